//! `tokenize`: text to token ids and back.

use anyhow::{Result, bail};
use carat_text::{Specials, TokenId, Tokenizer};

use crate::{
    args::TokenizeArgs,
    input, load,
    settings::Settings,
    terminal::{Terminal, say},
};

pub(crate) fn run(args: &TokenizeArgs, settings: &Settings, terminal: Terminal) -> Result<()> {
    let file = load::open(settings, terminal)?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let text = if let Some(text) = args.text.as_ref().filter(|t| *t != "-") {
        text.clone()
    } else {
        input::stdin_text(terminal)?
    };
    if args.decode {
        return say(tokenizer.decode(&parse_ids(&text, tokenizer.vocab().len())?));
    }
    let specials = if args.special {
        Specials::Parse
    } else {
        Specials::Ignore
    };
    let ids = if args.no_bos {
        tokenizer.encode(&text, specials)
    } else {
        tokenizer.encode_prompt(&text, specials)
    };
    if args.ids {
        let ids: Vec<String> = ids.iter().map(TokenId::to_string).collect();
        return say(ids.join(" "));
    }
    for id in ids {
        say(format_args!(
            "{id:>8}  {:?}",
            tokenizer.vocab().text(id).unwrap_or_default()
        ))?;
    }
    Ok(())
}

fn parse_ids(text: &str, vocab: usize) -> Result<Vec<TokenId>> {
    let words = text
        .split([' ', ',', '\n', '\t', '[', ']'])
        .filter(|w| !w.is_empty());
    let mut ids = Vec::new();
    for word in words {
        match word.parse::<TokenId>() {
            Ok(id) if (id as usize) < vocab => ids.push(id),
            Ok(id) => bail!("token {id} is outside the vocabulary of {vocab}"),
            Err(_) => bail!("`{word}` is no token id"),
        }
    }
    Ok(ids)
}
