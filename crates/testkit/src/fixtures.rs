//! Tiny models of every variant with logits from transformers' Gemma 4; `data/fixtures/README.md` says how they were made.

use std::{
    fs,
    io::Cursor,
    path::{Path, PathBuf},
    sync::Arc,
};

use carat_gguf::{
    Gguf, QuantType,
    writer::{Writer, write_tensor},
};
use carat_model::{Model, TokenId};

/// One model, its prompt, and what is expected of it.
pub struct Fixture {
    pub name: &'static str,
    /// Relative L2 error of all logits that llama.cpp v0.5.0 has on this file.
    pub peer_error: f64,
    /// Share of positions where llama.cpp agrees on the likeliest token.
    pub peer_agreement: f64,
}

pub const ALL: [Fixture; 7] = [
    fixture("ple-shared-kv-f32", 0.0033, 1.000),
    fixture("ple-shared-kv-q8_0", 0.0612, 0.854),
    fixture("e2b-like-q4_0", 0.0335, 0.969),
    fixture("12b-like-q4_0", 0.0514, 0.906),
    fixture("moe-like-q8_0", 0.1068, 0.854),
    fixture("real-heads-q8_0", 0.0361, 0.979),
    fixture("real-heads-q4_k", 0.0432, 0.948),
];

const fn fixture(name: &'static str, peer_error: f64, peer_agreement: f64) -> Fixture {
    Fixture {
        name,
        peer_error,
        peer_agreement,
    }
}

impl Fixture {
    pub fn path(&self, suffix: &str) -> PathBuf {
        let mut folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/data/fixtures"));
        if !folder.exists() {
            // Test binaries may be carried to another machine and run at the root of a copy of the repository.
            folder = PathBuf::from("crates/testkit/data/fixtures");
        }
        folder.join(format!("{}{suffix}", self.name))
    }

    pub fn model(&self) -> Model {
        let path = self.path(".gguf");
        let file = if path.exists() {
            Gguf::open(&path)
        } else {
            Gguf::from_bytes(self.name, self.file())
        };
        Model::load(Arc::new(file.expect("fixtures open"))).expect("fixtures load")
    }

    /// The same with F32 matrices rounded to BF16, and stored as either.
    pub fn model_of_rounded_floats(&self, quant: QuantType) -> Model {
        let file = Gguf::from_bytes(self.name, self.file()).expect("fixtures open");
        let mut writer = Writer::default();
        for (key, value) in file.metadata().iter() {
            writer.copy(key, value);
        }
        let mut data = Vec::new();
        for (index, tensor) in file.tensors().enumerate() {
            let bytes = file.tensor_bytes(index);
            let stored = tensor.quant.expect("no table of integers");
            let is_matrix =
                stored == QuantType::F32 && tensor.shape.get(1).is_some_and(|rows| *rows > 1);
            let (stored, bytes) = if is_matrix {
                let values = bytes.as_chunks().0.iter();
                let bytes = values.flat_map(|[_, _, low, high]| match quant {
                    QuantType::F32 => vec![0, 0, *low, *high],
                    _ => vec![*low, *high],
                });
                (quant, bytes.collect())
            } else {
                (stored, bytes.to_vec())
            };
            writer.tensor(&tensor.name, &tensor.shape, stored);
            write_tensor(&mut data, &bytes).expect("memory takes all writes");
        }
        let mut bytes = Vec::new();
        writer
            .write_head(&mut bytes)
            .expect("memory takes all writes");
        bytes.extend(data);
        let file = Gguf::from_bytes(self.name, bytes).expect("a file of the same shapes");
        Model::load(Arc::new(file)).expect("the same model")
    }

    /// The bytes of the model's file. Those that no test names are kept packed.
    pub fn file(&self) -> Vec<u8> {
        let plain = fs::read(self.path(".gguf"));
        plain.unwrap_or_else(|_| {
            unpacked(fs::read(self.path(".gguf.xz")).expect("fixtures are there"))
        })
    }

    /// The file, unpacked into a folder, for programs that open it themselves.
    pub fn written(&self, folder: &Path) -> PathBuf {
        let path = folder.join(format!("{}.gguf", self.name));
        fs::write(&path, self.file()).expect("a folder to write to");
        path
    }

    pub fn tokens(&self) -> Vec<TokenId> {
        let text = fs::read_to_string(self.path(".json")).expect("fixtures have tokens");
        let json: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
        let ids = json["tokens"].as_array().expect("an array of ids");
        ids.iter()
            .map(|id| id.as_u64().expect("an id") as TokenId)
            .collect()
    }

    /// `[positions, vocab]`.
    pub fn logits(&self) -> Vec<f32> {
        let packed = fs::read(self.path(".logits.f32.xz")).expect("fixtures have logits");
        let planes = unpacked(packed);
        let count = planes.len() / size_of::<f32>();
        let byte = |place: usize, of: usize| planes[place * count + of];
        let value = |of| f32::from_le_bytes(std::array::from_fn(|place| byte(place, of)));
        (0..count).map(value).collect()
    }
}

fn unpacked(packed: Vec<u8>) -> Vec<u8> {
    let mut bytes = Vec::new();
    lzma_rs::xz_decompress(&mut Cursor::new(packed), &mut bytes).expect("fixtures unpack");
    bytes
}
