//! Flags that people know from other programs: those that mean the same are understood, the others are answered by name.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Short flags of several letters, which the parser would take for several flags.
const SPELLINGS: [(&str, &str); 9] = [
    ("-ngl", "--n-gpu-layers"),
    ("-sys", "--system"),
    ("-np", "--parallel"),
    ("-mm", "--mmproj"),
    ("-fa", "--flash-attn"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-tb", "--threads-batch"),
    ("-cnv", "--conversation"),
];

/// Flags that mean nothing here, and what to do instead.
const ANSWERS: [(&str, &str); 19] = [
    (
        "--mmproj",
        "pictures and sound are not read, only text is; leave it out",
    ),
    ("--image", "pictures are not read, only text is"),
    ("--audio", "sound is not read, only text is"),
    (
        "--flash-attn",
        "attention is always computed that way; leave it out",
    ),
    (
        "--cache-type-k",
        "--kv-type TYPE is for keys and values alike",
    ),
    (
        "--cache-type-v",
        "--kv-type TYPE is for keys and values alike",
    ),
    ("--threads-batch", "-t N is for prompts and answers alike"),
    (
        "--batch-size",
        "the backend knows its best batch; leave it out",
    ),
    (
        "--ubatch-size",
        "the backend knows its best batch; leave it out",
    ),
    (
        "--conversation",
        "`carat chat` is the conversation; leave it out",
    ),
    ("--jinja", "templates are always rendered; leave it out"),
    (
        "--mlock",
        "model files are mapped and stay in memory while there is room; leave it out",
    ),
    ("--no-mmap", "model files are always mapped; leave it out"),
    (
        "--hf-repo",
        "-m hf:OWNER/REPO[:QUANT] names a model of the hub",
    ),
    (
        "--hf-token",
        "the token comes from the environment, as HF_TOKEN",
    ),
    ("--split-mode", "one card computes; --device N says which"),
    ("--tensor-split", "one card computes; --device N says which"),
    ("--main-gpu", "--device N says which card computes"),
    (
        "--lora",
        "adapters are not read; merge them into the model file",
    ),
];

/// The arguments typed, in the spelling of this program.
pub(crate) fn understood(typed: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut all = Vec::new();
    let mut typed = typed;
    while let Some(word) = typed.next() {
        if word == "--" {
            all.push(word);
            break;
        }
        if word == "-hf" {
            let mut model = OsString::from("hf:");
            model.push(typed.next().unwrap_or_default());
            all.extend([OsString::from("--model"), model]);
            continue;
        }
        let known = SPELLINGS.iter().find(|(short, _)| word == *short);
        all.push(known.map_or(word, |(_, long)| OsString::from(*long)));
    }
    all.extend(typed);
    all
}

/// A sentence for a flag that this program does not have but people know.
pub(crate) fn answer(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let flag = flag.split('=').next().unwrap_or(flag);
    let (flag, answer) = ANSWERS.iter().find(|(name, _)| *name == flag)?;
    Some(format!("{flag} is no flag of this program: {answer}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Arguments;

    fn typed(words: &[&str]) -> Vec<OsString> {
        let words = ["carat"].iter().chain(words).map(OsString::from);
        understood(words)
    }

    #[test]
    fn other_spellings_are_understood_before_the_end_of_flags() {
        assert_eq!(
            typed(&["run", "-ngl", "0", "-hf", "a/b:Q4_0", "--", "-ngl"]),
            [
                "carat",
                "run",
                "--n-gpu-layers",
                "0",
                "--model",
                "hf:a/b:Q4_0",
                "--",
                "-ngl"
            ]
        );
        for words in [
            &["run", "-ngl", "99", "x"][..],
            &["run", "--ctx-size", "512", "x"],
            &["run", "-s", "-1", "--top-k", "-1", "-n", "-1", "x"],
            &[
                "run",
                "--n-predict",
                "5",
                "--grammar",
                "root ::= \"a\"",
                "x",
            ],
            &["serve", "-np", "2", "--ctx-size", "512"],
        ] {
            let parsed = Arguments::try_parse_from(typed(words));
            assert!(parsed.is_ok(), "{words:?}: {:?}", parsed.err());
        }
    }

    /// One that is a flag after all would never be answered.
    #[test]
    fn every_answer_is_to_a_flag_that_is_none() {
        for (flag, sentence) in ANSWERS {
            let error = Arguments::try_parse_from(["carat", "run", flag, "x"]).unwrap_err();
            let answer = answer(&error).unwrap_or_else(|| panic!("{flag}: {error}"));
            assert!(answer.contains(flag) && answer.contains(sentence));
        }
    }
}
