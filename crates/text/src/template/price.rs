//! Prices of the engine's filters, functions and methods.
//!
//! A call is paid for before it is made: by the arguments alone where the result is of their size, by a computation of
//! the result's size where it is not.

use minijinja::{
    Error, Value,
    value::{Kwargs, ValueKind},
};

use super::meter::{self, ENTRY, Meter, NODE, text_bytes};

/// Least price of a call, so that calls which take no step of their own come to an end too.
const CALL: u64 = 64;
/// Searching a text for another takes longer than copying it.
const SEARCH: u64 = 8;

/// Product of a call that is paid for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Price {
    /// A number, an item, or the argument itself.
    Read,
    /// A text of up to so many times the size.
    Text(u64),
    /// The text of a value, indented perhaps.
    Print,
    /// A list of the items, which stay as they are.
    Items,
    /// A list of the items, each looked at to its end.
    List,
    /// Lists of items within a list.
    Nest,
    /// For each item, another filter or test with the other arguments.
    Each,
    /// A sum, which with a text to begin with is a text.
    Sum,
    /// A text with another in place of each hit.
    Replace,
    /// The texts of all items, with another between.
    Join,
    /// The pieces of a text.
    Split,
    /// A text with so many spaces per line.
    Indent,
    /// A text with the others in it, in fields of some width.
    Format,
    /// Lists of a given length, or a given number of lists.
    Batch,
}

impl Price {
    /// The price of a method that Python's values have.
    pub(super) fn of_method(kind: ValueKind, method: &str) -> Price {
        match (kind, method) {
            (ValueKind::Map, "get") => Price::Read,
            (ValueKind::Map, "items") => Price::Nest,
            (ValueKind::Map, _) => Price::Items,
            (ValueKind::String, "replace") => Price::Replace,
            (ValueKind::String, "join") => Price::Join,
            (ValueKind::String, "split" | "splitlines") => Price::Split,
            (ValueKind::String, "format") => Price::Format,
            (ValueKind::String, "upper" | "lower" | "title" | "capitalize") => Price::Text(3),
            (ValueKind::String, _) => Price::Text(1),
            _ => Price::List,
        }
    }

    /// Takes what a call with these arguments costs.
    pub(super) fn pay(self, meter: &mut Meter, args: &[Value]) -> Result<(), Error> {
        meter.spend(CALL)?;
        let Some((first, others)) = args.split_first() else {
            return Ok(());
        };
        if self != Price::Read {
            others.iter().try_for_each(meter::holdable)?;
        }
        match self {
            Price::Read if text_bytes(first).is_some() => meter.read(first),
            Price::Read => Ok(()),
            Price::Text(times) => args.iter().try_for_each(|arg| {
                let bytes = meter.printed(arg)?;
                meter.spend(bytes.saturating_mul(times))
            }),
            Price::Print => {
                let bytes = meter.printed(first)?;
                meter.spend(bytes.saturating_mul(8))
            }
            Price::Items => args
                .iter()
                .try_for_each(|arg| meter.spend(items(arg).saturating_mul(2 * NODE))),
            Price::List | Price::Nest => args.iter().try_for_each(|arg| pay_items(meter, arg)),
            Price::Each => {
                let mut each = CALL;
                for other in others {
                    each = each.saturating_add(meter.printed(other)?);
                }
                pay_items(meter, first)?;
                meter.spend(items(first).saturating_mul(each))
            }
            Price::Sum => pay_sum(meter, first, others),
            Price::Join => pay_join(meter, first, others),
            Price::Batch => {
                pay_items(meter, first)?;
                meter.spend(greatest_number(others).saturating_mul(4 * NODE))
            }
            Price::Replace | Price::Split | Price::Indent | Price::Format => {
                self.pay_places(meter, first, others)
            }
        }
    }

    /// Takes what depends on the number of certain places in a text.
    fn pay_places(self, meter: &mut Meter, text: &Value, others: &[Value]) -> Result<(), Error> {
        let bytes = meter.printed(text)?;
        // In another value, which is printed first, as many as can be.
        let places =
            |count: &dyn Fn(&str) -> usize| text.as_str().map_or(bytes, |text| count(text) as u64);
        let wanted = others.first().and_then(Value::as_str);
        let (places, each) = match self {
            Price::Replace => {
                let hits = places(&|text| wanted.map_or(text.len(), |it| text.matches(it).count()));
                let to = others.get(1).map_or(Ok(0), |to| meter.printed(to))?;
                (hits, to)
            }
            Price::Split => {
                let cuts = places(&|text| match wanted {
                    Some(separator) => text.matches(separator).count(),
                    None => text.matches(char::is_whitespace).count(),
                });
                (cuts + 2, 2 * NODE)
            }
            Price::Indent => {
                let lines = places(&|text| text.matches('\n').count());
                (lines + 2, greatest_number(others))
            }
            _ => {
                let fields = places(&|text| text.matches(['%', '{']).count());
                let mut each = text.as_str().map_or(bytes, widths);
                each = each.saturating_add(greatest_number(others));
                for other in others {
                    each = each.saturating_add(meter.printed(other)?.saturating_mul(8));
                }
                (fields + 1, each)
            }
        };
        meter.spend((SEARCH * bytes).saturating_add(places.saturating_mul(each)))
    }

    /// Settles what a call returned, and looks for nesting in it.
    pub(super) fn receive(self, meter: &mut Meter, made: Value) -> Result<Value, Error> {
        let made = meter.settle(made)?;
        if matches!(self, Price::Nest | Price::Each | Price::Batch) {
            meter.made(&made)?;
        }
        Ok(made)
    }
}

fn pay_sum(meter: &mut Meter, first: &Value, others: &[Value]) -> Result<(), Error> {
    pay_items(meter, first)?;
    let names_start = |arg: &Value| arg.get_attr("start").is_ok_and(|it| !it.is_undefined());
    if others.len() > 1 || others.iter().any(names_start) {
        let bytes = meter.printed(first)?;
        meter.spend(items(first).saturating_mul(bytes))?;
    }
    Ok(())
}

fn pay_join(meter: &mut Meter, first: &Value, others: &[Value]) -> Result<(), Error> {
    let separator = others.first().and_then(text_bytes).unwrap_or(0);
    meter.spend(items(first).saturating_mul(separator))?;
    if items(first) > 0 {
        for item in first.try_iter()? {
            let bytes = meter.printed(&item)?;
            meter.spend(NODE + bytes)?;
        }
    }
    Ok(())
}

/// Items of a list, or bytes of a text, of which each may become one.
fn items(value: &Value) -> u64 {
    text_bytes(value).unwrap_or_else(|| value.len().unwrap_or(0) as u64)
}

/// Pays for a list of all items of a value, each looked at to its end.
fn pay_items(meter: &mut Meter, value: &Value) -> Result<(), Error> {
    if let Some(bytes) = text_bytes(value) {
        return meter.spend(bytes.saturating_mul(2 * NODE));
    }
    let bytes = meter.printed(value)?;
    meter.spend(bytes.saturating_add(items(value).saturating_mul(ENTRY)))
}

/// The greatest number among the arguments, named ones included: the most a width or count can be.
fn greatest_number(args: &[Value]) -> u64 {
    /// The engine's width of an indent where none is given.
    const DEFAULT: usize = 4;
    let named = args
        .iter()
        .filter_map(|arg| Kwargs::try_from(arg.clone()).ok())
        .flat_map(|named| {
            let values = named.args().filter_map(|name| named.peek(name).ok());
            values.collect::<Vec<Value>>()
        });
    let numbers = args.iter().cloned().chain(named);
    numbers
        .filter_map(|arg| arg.as_usize())
        .max()
        .unwrap_or(DEFAULT) as u64
}

/// The widths and precisions that a format names, added up.
fn widths(format: &str) -> u64 {
    format
        .split(|character: char| !character.is_ascii_digit())
        .filter(|digits| !digits.is_empty())
        .map(|digits| digits.parse().unwrap_or(u64::MAX))
        .fold(0, u64::saturating_add)
}
