//! The models of a command: the flags, and where the files are when the flags do not say.

use std::{
    env,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context as _, Result, ensure};
use treespec_engine::{CpuOptions, DeviceChoice, Isa, Precision};

const TARGET_VARIABLE: &str = "TREESPEC_TARGET";
/// Names a precision where no flag does.
pub(crate) const PRECISION_VARIABLE: &str = "TREESPEC_CPU_PRECISION";
/// Names an instruction set where no flag does.
pub(crate) const ISA_VARIABLE: &str = "TREESPEC_CPU_ISA";
const DRAFTER_VARIABLE: &str = "TREESPEC_DRAFTER";
const DEFAULT_TARGET: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
const DEFAULT_DRAFTER: &str = "deploy/models/smollm2-135m-instruct-dflash";

/// Which models a command loads, or has its own cluster load.
// Not clap's `env`: a variable set for other commands must not conflict with `--endpoint` or `--no-drafter`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ModelArgs {
    /// Target model: a Hugging Face directory or a GGUF file [env: TREESPEC_TARGET] [default: the model that `make
    /// models` fetches]
    #[arg(long, value_name = "PATH")]
    pub target: Option<PathBuf>,
    /// DFlash drafter directory made for the target [env: TREESPEC_DRAFTER] [default: the default target's drafter;
    /// none for another target]
    #[arg(long, value_name = "PATH")]
    pub drafter: Option<PathBuf>,
    /// Load no drafter and decode plainly
    #[arg(long, conflicts_with = "drafter")]
    pub no_drafter: bool,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Arithmetic of linear layers on a CPU: f32, or quantised (8-bit activations where the weights are quantised) [env:
    /// TREESPEC_CPU_PRECISION] [default: quantised for a quantised file, f32 otherwise]
    #[arg(long, value_name = "PRECISION")]
    pub cpu_precision: Option<Precision>,
    /// Instruction set of the CPU kernels, to compare them [env: TREESPEC_CPU_ISA] [default: the best there is]
    #[arg(long, value_name = "ISA")]
    pub cpu_isa: Option<Isa>,
    /// Where the models run: cpu, or cuda:N for the GPU number N [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

/// Existing model files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelPaths {
    /// The target.
    pub target: PathBuf,
    /// Its drafter, if there is one.
    pub drafter: Option<PathBuf>,
}

impl ModelArgs {
    /// The files to load: flags before environment variables before defaults. The default drafter belongs to the
    /// default target only; another target without a drafter of its own decodes plainly.
    ///
    /// # Errors
    /// A named path that does not exist, or a missing default, with the fix.
    pub(crate) fn resolve(&self) -> Result<ModelPaths> {
        let target = self.target()?;
        let drafter = self.drafter_for(&target)?;
        Ok(ModelPaths { target, drafter })
    }

    /// How models in this process run on the CPU: flags before environment variables.
    ///
    /// # Errors
    /// A variable that names no precision or no instruction set.
    pub(crate) fn cpu(&self) -> Result<CpuOptions> {
        Ok(CpuOptions {
            threads: self.threads.map_or(0, NonZeroUsize::get),
            isa: flag_or_variable(self.cpu_isa, ISA_VARIABLE)?,
            precision: flag_or_variable(self.cpu_precision, PRECISION_VARIABLE)?,
        })
    }

    /// The target alone.
    ///
    /// # Errors
    /// See [`Self::resolve`].
    pub(crate) fn target(&self) -> Result<PathBuf> {
        match chosen(self.target.as_deref(), TARGET_VARIABLE) {
            Some(path) => existing("target", path),
            None => default_model("target", DEFAULT_TARGET, "--target PATH"),
        }
    }

    fn drafter_for(&self, target: &Path) -> Result<Option<PathBuf>> {
        if self.no_drafter {
            return Ok(None);
        }
        if let Some(path) = chosen(self.drafter.as_deref(), DRAFTER_VARIABLE) {
            return existing("drafter", path).map(Some);
        }
        if default_path(DEFAULT_TARGET).is_some_and(|default| same_file(&default, target)) {
            return default_model("drafter", DEFAULT_DRAFTER, "--drafter PATH or --no-drafter")
                .map(Some);
        }
        tracing::warn!(
            path = %target.display(),
            "no drafter is known for this target: it decodes plainly; give --drafter PATH to speculate"
        );
        Ok(None)
    }
}

fn flag_or_variable<T>(flag: Option<T>, variable: &str) -> Result<Option<T>>
where
    T: FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    match env::var(variable) {
        Ok(value) if flag.is_none() && !value.is_empty() => {
            value.parse().map(Some).with_context(|| variable.to_owned())
        }
        _ => Ok(flag),
    }
}

fn chosen(flag: Option<&Path>, variable: &str) -> Option<PathBuf> {
    flag.map(Path::to_owned).or_else(|| {
        env::var_os(variable)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    })
}

fn existing(what: &str, path: PathBuf) -> Result<PathBuf> {
    ensure!(
        path.exists(),
        "the {what} {} does not exist",
        path.display()
    );
    Ok(path)
}

fn default_model(what: &str, relative: &str, flag: &str) -> Result<PathBuf> {
    default_path(relative).with_context(|| {
        format!("the default {what} {relative} is not here: run `make models` in the repository, or give {flag}")
    })
}

fn same_file(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

fn default_path(relative: &str) -> Option<PathBuf> {
    let executable = env::current_exe().ok();
    let bases = search_bases(env::current_dir().ok().as_deref(), executable.as_deref());
    find_below(&bases, relative)
}

/// The current directory, then every folder above the executable (a build in `target/release` finds its checkout).
fn search_bases(current: Option<&Path>, executable: Option<&Path>) -> Vec<PathBuf> {
    let above_executable = executable
        .into_iter()
        .flat_map(|path| path.ancestors().skip(1));
    current
        .into_iter()
        .chain(above_executable)
        .map(Path::to_owned)
        .collect()
}

fn find_below(bases: &[PathBuf], relative: &str) -> Option<PathBuf> {
    bases
        .iter()
        .map(|base| base.join(relative))
        .find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_current_directory_wins_over_the_executables_ancestors() {
        let root = tempfile::tempdir().unwrap();
        let here = root.path().join("here");
        let binary = root.path().join("checkout/target/release/treespec");
        fs::create_dir_all(root.path().join("checkout/models")).unwrap();
        fs::create_dir_all(&here).unwrap();
        let bases = search_bases(Some(&here), Some(&binary));

        assert_eq!(
            find_below(&bases, "models"),
            Some(root.path().join("checkout/models"))
        );
        fs::create_dir_all(here.join("models")).unwrap();
        assert_eq!(find_below(&bases, "models"), Some(here.join("models")));
        assert_eq!(find_below(&bases, "absent"), None);
    }

    #[test]
    fn another_target_has_no_drafter_unless_one_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let target = Some(path.clone());
        let alone = ModelArgs {
            target: target.clone(),
            ..Default::default()
        };
        assert_eq!(
            alone.resolve().unwrap(),
            ModelPaths {
                target: path.clone(),
                drafter: None
            }
        );
        let both = ModelArgs {
            target,
            drafter: Some(path.clone()),
            ..Default::default()
        };
        assert_eq!(
            both.resolve().unwrap(),
            ModelPaths {
                target: path.clone(),
                drafter: Some(path)
            }
        );
    }

    #[test]
    fn a_missing_path_is_named_and_a_missing_default_names_the_fix() {
        let args = ModelArgs {
            target: Some("no/such/model".into()),
            ..Default::default()
        };
        assert_eq!(
            args.resolve().unwrap_err().to_string(),
            "the target no/such/model does not exist"
        );
        let error = default_model("target", "no/such/default.gguf", "--target PATH").unwrap_err();
        assert!(error.to_string().contains("make models"), "{error}");
    }
}
