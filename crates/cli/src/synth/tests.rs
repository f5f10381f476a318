//! Small models through the same code, and the shapes and formats of the large ones without their bytes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use carat_gguf::quant::random_blocks;
use carat_model::{Model, synthetic::dimensions::FullValues};
use carat_testkit::tiny::Variant;
use clap::ValueEnum;

use super::*;

fn options() -> Options {
    Options {
        threads: 2,
        ..Options::default()
    }
}

#[test]
fn small_models_of_every_variant_and_mix_load_and_are_finite() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("m.gguf");
    for variant in Variant::ALL {
        for &mix in Mix::value_variants() {
            let dimensions = variant.dimensions(256);
            let summary = write_model(dimensions.clone(), mix, &out, options()).unwrap();
            assert_eq!(summary.bytes, fs::metadata(&out).unwrap().len());
            let file = Gguf::open(&out).unwrap();
            assert_eq!(summary.tensors, file.tensors().len());
            for (plan, info) in dimensions.tensors().iter().zip(file.tensors()) {
                assert_eq!((&plan.name, &plan.shape), (&info.name, &info.shape));
                let tensor = file.tensor(&info.name).unwrap().unwrap();
                let mut values = vec![0.0; info.shape.iter().product()];
                tensor.quant.dequantize(tensor.bytes, &mut values);
                assert!(values.iter().all(|v| v.is_finite()), "{}", info.name);
            }
            Model::load(file.into()).unwrap();
        }
    }
}

#[test]
fn every_format_is_in_some_mix() {
    let mut seen: Vec<QuantType> = Vec::new();
    for mix in Mix::value_variants() {
        let dimensions = Preset::B26A4b.dimensions();
        let layers = dimensions.layers();
        seen.extend(dimensions.tensors().iter().map(|t| mix.format(t, layers)));
    }
    for quant in QuantType::all() {
        assert!(seen.contains(&quant), "{quant}");
    }
}

#[test]
fn dynamic_mixes_change_formats_within_a_layer() {
    let mixes = Mix::value_variants().iter();
    let dynamic = mixes.filter(|mix| {
        let name = mix.to_possible_value().unwrap();
        name.get_name().starts_with("ud-")
    });
    let mut count = 0;
    for mix in dynamic {
        let dimensions = Preset::B12.dimensions();
        let layers = dimensions.layers();
        let first = dimensions.tensors().into_iter().filter(|t| t.layer == 0);
        let attention = first.filter(|t| t.name.contains("blk.0.attn_") && t.role != Role::Vector);
        let formats: BTreeSet<QuantType> = attention.map(|t| mix.format(&t, layers)).collect();
        assert!(formats.len() > 1, "{mix:?}: {formats:?}");
        count += 1;
    }
    assert_eq!(count, 6);
}

#[test]
fn threads_do_not_change_the_file() {
    let folder = tempfile::tempdir().unwrap();
    // Wide enough that the embedding takes several pieces.
    let dimensions = Dimensions {
        vocab: 20_000,
        ..Variant::Dense12b.dimensions(256)
    };
    let files = [1, 3].map(|threads| {
        let out = folder.path().join(format!("{threads}.gguf"));
        let options = Options {
            threads,
            ..options()
        };
        write_model(dimensions.clone(), Mix::Q8_0, &out, options).unwrap();
        fs::read(out).unwrap()
    });
    assert!(files[0] == files[1]);
    assert!(files[0].len() > PIECE_BYTES);
}

#[test]
fn vocabulary_of_another_file_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let (donor, out) = (folder.path().join("v.gguf"), folder.path().join("m.gguf"));
    let dimensions = Dimensions {
        vocab: 450,
        ..Variant::Dense12b.dimensions(32)
    };
    write_model(dimensions, Mix::Q4_0, &donor, options()).unwrap();
    let with_vocabulary = Options {
        vocabulary: Some(donor),
        ..options()
    };
    write_model(
        Variant::E2b.dimensions(256),
        Mix::Q4_0,
        &out,
        with_vocabulary,
    )
    .unwrap();
    let file = Gguf::open(&out).unwrap();
    let tokens = file.metadata().array("tokenizer.ggml.tokens").unwrap();
    let expected = Vocabulary::packed(450).tokens;
    assert!(tokens.unwrap().strings().unwrap().eq(expected));
    let embedding = file.tensor("token_embd.weight").unwrap().unwrap();
    assert_eq!(embedding.info.shape, [256, 450]);
}

#[test]
fn stopping_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let stopped = Options {
        progress: Box::new(|_, _| ControlFlow::Break(())),
        ..Options::default()
    };
    assert!(write_model(Variant::Dense12b.dimensions(32), Mix::Q8_0, &out, stopped).is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn progress_ends_at_the_total() {
    let folder = tempfile::tempdir().unwrap();
    let (sender, receiver) = mpsc::channel();
    let with_progress = Options {
        progress: Box::new(move |done, total| {
            sender.send((done, total)).unwrap();
            ControlFlow::Continue(())
        }),
        ..options()
    };
    let out = folder.path().join("m.gguf");
    write_model(
        Variant::Dense12b.dimensions(32),
        Mix::Q8_0,
        &out,
        with_progress,
    )
    .unwrap();
    let reports: Vec<(u64, u64)> = receiver.iter().collect();
    assert!(reports.is_sorted());
    let (done, total) = reports.last().unwrap();
    assert_eq!(done, total);
}

#[test]
fn places_that_cannot_be_written_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let message = |out: &Path| {
        let error =
            write_model(Variant::E2b.dimensions(32), Mix::Q8_0, out, options()).unwrap_err();
        format!("{error:#}").replace(folder.path().to_str().unwrap(), "FOLDER")
    };
    assert_eq!(
        message(folder.path()),
        "`FOLDER` is a folder; name a file in it"
    );
    assert!(
        message(&folder.path().join("absent/m.gguf"))
            .starts_with("cannot write `FOLDER/absent/m.gguf`")
    );
}

/// Formats of a preset's tensors, counted.
fn formats(preset: Preset, mix: Mix) -> (BTreeMap<&'static str, usize>, u64) {
    let jobs = Jobs::plan(&preset.dimensions(), mix, 1, &mut Writer::default());
    let mut counts = BTreeMap::new();
    for (_, quant) in &jobs.tensors {
        *counts.entry(quant.name()).or_default() += 1;
    }
    (counts, jobs.total_bytes)
}

#[test]
fn presets_have_the_published_number_of_tensors() {
    for (preset, published) in [
        // Less K, V and K norm of the layers that share: newer files leave them out.
        (Preset::E2b, 601 - 3 * 20),
        (Preset::E4b, 720 - 3 * 18),
        (Preset::B12, 667),
        (Preset::B26A4b, 658),
        (Preset::B31, 833),
    ] {
        assert_eq!(preset.dimensions().tensors().len(), published, "{preset:?}");
    }
}

#[test]
fn presets_differ_in_what_full_layers_use_as_values() {
    assert_eq!(Preset::E4b.dimensions().full_values, FullValues::Projected);
    assert_eq!(Preset::B31.dimensions().full_values, FullValues::Keys);
}

#[test]
fn mixes_are_those_of_published_files() {
    let (e2b, bytes) = formats(Preset::E2b, Mix::Q4_0);
    let expected = [("BF16", 1), ("F32", 333), ("Q4_0", 206), ("Q6_K", 1)];
    assert_eq!(e2b, BTreeMap::from(expected));
    assert!((2.5e9..3.0e9).contains(&(bytes as f64)), "{bytes}");

    // Rows of 2112 and 704 do not divide into blocks of 256.
    let (moe, _) = formats(Preset::B26A4b, Mix::Q4_K_M);
    assert!(moe.contains_key("Q5_0") && moe.contains_key("Q8_0"));
    let (dense, _) = formats(Preset::B12, Mix::Q4_K_M);
    assert!(!dense.contains_key("Q5_0") && !dense.contains_key("Q8_0"));

    let (e2b, _) = formats(Preset::E2b, Mix::Q4_K_M);
    assert_eq!(e2b["F32"], 333 - 70, "bottlenecks are quantized");
    assert_eq!((e2b["Q5_K"], e2b["BF16"]), (1, 1));
}

#[test]
fn bf16_weights_in_f32_are_exact() {
    let mut bytes = vec![0; 64];
    random_blocks(QuantType::F32, 1, 1.0, &mut bytes);
    truncate_to_bf16(&mut bytes);
    let mut values = [0.0; 16];
    QuantType::F32.dequantize(&bytes, &mut values);
    assert!(
        values
            .iter()
            .all(|v| v.to_bits().trailing_zeros() >= 16 && *v != 0.0)
    );
}
