//! A minimal GGUF writer for files that no converter would write.

use std::io::Write;

use tempfile::NamedTempFile;

#[derive(Clone)]
pub(crate) enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

pub(crate) fn text(value: &str) -> Meta {
    Meta::Text(value.to_owned())
}

#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Row-major, outermost first.
    pub(crate) shape: Vec<usize>,
    pub(crate) type_id: u32,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Clone, Default)]
pub(crate) struct Gguf {
    pub(crate) metadata: Vec<(String, Meta)>,
    pub(crate) tensors: Vec<Tensor>,
}

impl Gguf {
    pub(crate) fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(other, _)| other != key);
        self.metadata.push((key.to_owned(), value));
    }

    pub(crate) fn f32_tensor(&mut self, name: &str, shape: &[usize], value: impl Fn(usize) -> f32) {
        let count: usize = shape.iter().product();
        self.tensors.push(Tensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            type_id: 0,
            bytes: (0..count)
                .flat_map(|index| value(index).to_le_bytes())
                .collect(),
        });
    }

    /// Gives the tensor `name` other bytes, in the number format `type_id`.
    pub(crate) fn store(&mut self, name: &str, type_id: u32, bytes: Vec<u8>) {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.name == name);
        let tensor = tensor.unwrap();
        (tensor.type_id, tensor.bytes) = (type_id, bytes);
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            push_text(&mut file, key);
            push_value(&mut file, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            push_text(&mut file, &tensor.name);
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            for &dim in tensor.shape.iter().rev() {
                file.extend((dim as u64).to_le_bytes());
            }
            file.extend(tensor.type_id.to_le_bytes());
            file.extend(offset.to_le_bytes());
            offset += (tensor.bytes.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(32), 0);
            file.extend(&tensor.bytes);
        }
        file
    }

    pub(crate) fn save(&self) -> NamedTempFile {
        saved(&self.bytes())
    }
}

pub(crate) fn saved(bytes: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::with_suffix(".gguf").unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn push_text(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.bytes());
}

fn push_value(file: &mut Vec<u8>, value: &Meta) {
    let push_id = |file: &mut Vec<u8>, id: u32| file.extend(id.to_le_bytes());
    match value {
        Meta::U32(value) => {
            push_id(file, 4);
            file.extend(value.to_le_bytes());
        }
        Meta::F32(value) => {
            push_id(file, 6);
            file.extend(value.to_le_bytes());
        }
        Meta::Bool(value) => {
            push_id(file, 7);
            file.push((*value).into());
        }
        Meta::Text(value) => {
            push_id(file, 8);
            push_text(file, value);
        }
        Meta::Texts(values) => {
            push_id(file, 9);
            push_id(file, 8);
            file.extend((values.len() as u64).to_le_bytes());
            for value in values {
                push_text(file, value);
            }
        }
        Meta::I32s(values) => {
            push_id(file, 9);
            push_id(file, 5);
            file.extend((values.len() as u64).to_le_bytes());
            for value in values {
                file.extend(value.to_le_bytes());
            }
        }
    }
}
