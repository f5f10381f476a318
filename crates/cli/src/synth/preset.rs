//! The shapes of the published models.

use carat_model::{
    config::Experts,
    synthetic::{ByKind, Dimensions, Vocabulary, dimensions::FullValues},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Preset {
    E2b,
    E4b,
    #[value(name = "12b")]
    B12,
    #[value(name = "26b-a4b")]
    B26A4b,
    #[value(name = "31b")]
    B31,
    E2bDrafter,
    E4bDrafter,
    #[value(name = "12b-drafter")]
    B12Drafter,
    #[value(name = "26b-a4b-drafter")]
    B26A4bDrafter,
    #[value(name = "31b-drafter")]
    B31Drafter,
}

impl Preset {
    pub(crate) fn dimensions(self) -> Dimensions {
        let dimensions = match self {
            Preset::E2b => Dimensions {
                // Layers that share KV are twice as wide.
                ffn: [vec![6144; 15], vec![12288; 20]].concat(),
                kinds: Dimensions::pattern(35, 5),
                dim: 1536,
                kv_heads: by_kind(1, 1),
                shared_kv_layers: 20,
                ..small()
            },
            Preset::E4b => Dimensions {
                ffn: vec![10240; 42],
                kinds: Dimensions::pattern(42, 6),
                dim: 2560,
                kv_heads: by_kind(2, 2),
                shared_kv_layers: 18,
                ..small()
            },
            Preset::B12 => Dimensions {
                ffn: vec![15360; 48],
                kinds: Dimensions::pattern(48, 6),
                dim: 3840,
                heads: 16,
                kv_heads: by_kind(8, 1),
                ..large()
            },
            Preset::B26A4b => Dimensions {
                ffn: vec![2112; 30],
                kinds: Dimensions::pattern(30, 6),
                dim: 2816,
                heads: 16,
                kv_heads: by_kind(8, 2),
                experts: Some(Experts {
                    count: 128,
                    used: 8,
                    ffn: 704,
                }),
                ..large()
            },
            Preset::B31 => Dimensions {
                ffn: vec![21504; 60],
                kinds: Dimensions::pattern(60, 6),
                dim: 5376,
                heads: 32,
                kv_heads: by_kind(16, 4),
                ..large()
            },
            Preset::E2bDrafter => drafter(Preset::E2b, (256, 2048, 4)),
            Preset::E4bDrafter => drafter(Preset::E4b, (256, 2048, 4)),
            Preset::B12Drafter => drafter(Preset::B12, (1024, 8192, 16)),
            Preset::B26A4bDrafter => drafter(Preset::B26A4b, (1024, 8192, 16)),
            Preset::B31Drafter => drafter(Preset::B31, (1024, 8192, 32)),
        };
        Dimensions {
            name: format!("synthetic Gemma 4 {}", self.name()),
            ..dimensions
        }
    }

    fn name(self) -> &'static str {
        match self {
            Preset::E2b => "E2B",
            Preset::E4b => "E4B",
            Preset::B12 => "12B",
            Preset::B26A4b => "26B-A4B",
            Preset::B31 => "31B",
            Preset::E2bDrafter => "E2B drafter",
            Preset::E4bDrafter => "E4B drafter",
            Preset::B12Drafter => "12B drafter",
            Preset::B26A4bDrafter => "26B-A4B drafter",
            Preset::B31Drafter => "31B drafter",
        }
    }
}

/// Four layers that read the keys and values of their target, as wide as the published drafters.
fn drafter(target: Preset, (dim, ffn, heads): (usize, usize, usize)) -> Dimensions {
    let of = target.dimensions();
    Dimensions {
        kinds: Dimensions::pattern(4, 4),
        dim,
        ffn: vec![ffn; 4],
        heads,
        shared_kv_layers: 4,
        ple: 0,
        experts: None,
        softcap: 0.0,
        target_dim: of.dim,
        ..of
    }
}

/// The common part of 12B, 26B-A4B and 31B; the rest is empty.
fn large() -> Dimensions {
    Dimensions {
        name: String::new(),
        kinds: Vec::new(),
        dim: 0,
        ffn: Vec::new(),
        heads: 0,
        kv_heads: by_kind(0, 0),
        head_dim: by_kind(256, 512),
        window: 1024,
        context: 262144,
        shared_kv_layers: 0,
        ple: 0,
        full_values: FullValues::Keys,
        experts: None,
        softcap: 30.0,
        vocab: Vocabulary::PUBLISHED,
        target_dim: 0,
    }
}

/// The common part of E2B and E4B.
fn small() -> Dimensions {
    Dimensions {
        heads: 8,
        window: 512,
        context: 131072,
        ple: 256,
        full_values: FullValues::Projected,
        ..large()
    }
}

fn by_kind(sliding: usize, full: usize) -> ByKind<usize> {
    ByKind { sliding, full }
}
