//! Instruction sets, and the choice of a kernel's form at run time.

use std::fmt;
use std::str::FromStr;

/// Instruction set that the kernels were chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 with VNNI and BF16: integer and bfloat16 products of 512 bits.
    Avx512Bf16,
    /// AVX-512 with VNNI: integer products of 512 bits.
    Avx512Vnni,
    /// AVX-512 F and BW: sixteen f32 in one register, integer products by AVX2.
    Avx512,
    /// AVX2 with AVX-VNNI: integer products of 256 bits in one instruction.
    Avx2Vnni,
    /// AVX2 with FMA and F16C: sixteen f32 in two registers.
    Avx2,
    /// NEON of 64-bit Arm: sixteen f32 in four registers, integer products by way of 16 bits.
    Neon,
    /// Whatever the compiler makes of arrays of sixteen.
    Portable,
}

/// A name of an instruction set that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set {0:?}: use one of {list}", list = Isa::names())]
pub struct UnknownIsa(String);

impl Isa {
    /// All, best first.
    pub const ALL: [Self; 7] = [
        Self::Avx512Bf16,
        Self::Avx512Vnni,
        Self::Avx512,
        Self::Avx2Vnni,
        Self::Avx2,
        Self::Neon,
        Self::Portable,
    ];

    /// The best that this processor has.
    pub fn detect() -> Self {
        Self::available().next().unwrap_or(Self::Portable)
    }

    /// All that this processor has, best first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 =
                avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            match self {
                Self::Avx512Bf16 => {
                    Self::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16")
                }
                Self::Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
                Self::Avx512 => avx512,
                Self::Avx2Vnni => avx2 && is_x86_feature_detected!("avxvnni"),
                Self::Avx2 => avx2,
                Self::Neon => false,
                Self::Portable => true,
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            match self {
                // The kernels take the first byte of a word for its lowest.
                Self::Neon => {
                    cfg!(target_endian = "little")
                        && std::arch::is_aarch64_feature_detected!("neon")
                }
                Self::Portable => true,
                Self::Avx512Bf16
                | Self::Avx512Vnni
                | Self::Avx512
                | Self::Avx2Vnni
                | Self::Avx2 => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == Self::Portable
        }
    }

    /// Name in the numerics profile and of the flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512Bf16 => "avx512bf16",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512 => "avx512",
            Self::Avx2Vnni => "avx2vnni",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// Whether bfloat16 products are one instruction.
    pub(super) fn multiplies_bf16(self) -> bool {
        self == Self::Avx512Bf16
    }

    /// Most rows of a tile of the integer and bfloat16 kernels.
    pub(super) fn integer_rows(self) -> usize {
        use super::lanes::{IntegerLanes as _, Portable};
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 | Self::Avx512Vnni => super::lanes::Avx512::INTEGER_ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx2Vnni | Self::Avx2 => super::lanes::Avx2::<false>::INTEGER_ROWS,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => super::lanes::Neon::INTEGER_ROWS,
            _ => Portable::INTEGER_ROWS,
        }
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.name() == text)
            .ok_or_else(|| UnknownIsa(text.to_owned()))
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Calls a kernel `unsafe fn name<L>(args)` for the lanes, compiled with the target features.
///
/// The generic body is wrapped in a function with the features enabled; it is `#[inline(always)]`, so it is compiled with
/// them.
macro_rules! call_with {
    ($features:literal, $lanes:ty, $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?) => {{
        #[target_feature(enable = $features)]
        unsafe fn form($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the caller of the dispatch upholds the kernel's contract.
            unsafe { $name::<$lanes>($($arg),*) }
        }
        // SAFETY: `Isa::is_available` found the features, and the caller upholds the kernel's contract.
        unsafe { form($($arg),*) }
    }};
}

/// Calls a kernel `unsafe fn name<L: Lanes>(args)` in the form for an [`Isa`].
macro_rules! dispatch {
    ($isa:expr, $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {{
        use $crate::cpu::kernels::{Isa, isa::call_with, lanes};
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 => call_with!(
                "avx512f,avx512bw,avx2,fma,f16c", lanes::Avx512, $name($($arg: $ty),*) $(-> $ret)?
            ),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni | Isa::Avx2 => call_with!(
                "avx2,fma,f16c", lanes::Avx2<false>, $name($($arg: $ty),*) $(-> $ret)?
            ),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => call_with!("neon", lanes::Neon, $name($($arg: $ty),*) $(-> $ret)?),
            // SAFETY: the portable form runs everywhere, and the caller upholds the kernel's contract.
            _ => unsafe { $name::<lanes::Portable>($($arg),*) },
        }
    }};
}

/// Likewise for `unsafe fn name<L: IntegerLanes>(args)`.
macro_rules! dispatch_integer {
    ($isa:expr, $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {{
        use $crate::cpu::kernels::{Isa, isa::call_with, lanes};
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 | Isa::Avx512Vnni => call_with!(
                "avx512f,avx512bw,avx512vnni,avx2,fma,f16c",
                lanes::Avx512, $name($($arg: $ty),*) $(-> $ret)?
            ),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni => call_with!(
                "avxvnni,avx2,fma,f16c", lanes::Avx2<true>, $name($($arg: $ty),*) $(-> $ret)?
            ),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => call_with!(
                "avx2,fma,f16c", lanes::Avx2<false>, $name($($arg: $ty),*) $(-> $ret)?
            ),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => call_with!("neon", lanes::Neon, $name($($arg: $ty),*) $(-> $ret)?),
            // SAFETY: the portable form runs everywhere, and the caller upholds the kernel's contract.
            _ => unsafe { $name::<lanes::Portable>($($arg),*) },
        }
    }};
}

/// Likewise for `unsafe fn name<L: Bf16Lanes>(args)`, on instruction sets that [`Isa::multiplies_bf16`] names.
macro_rules! dispatch_bf16 {
    ($isa:expr, $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        use $crate::cpu::kernels::{Isa, isa::call_with, lanes};
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => call_with!(
                "avx512f,avx512bw,avx512vnni,avx512bf16,avx2,fma,f16c",
                lanes::Avx512, $name($($arg: $ty),*) $(-> $ret)?
            ),
            _ => {
                let _ = ($(&$arg),*);
                unreachable!("bfloat16 arithmetic was chosen without its instructions")
            }
        }
    }};
}

pub(super) use {call_with, dispatch, dispatch_bf16, dispatch_integer};
