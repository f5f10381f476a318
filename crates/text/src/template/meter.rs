//! Counts what a template's values take, before they are made.
//!
//! Nothing is given back when a value dies, so the count bounds the memory alive at any time and, with it, the time
//! spent on copying. Reading is counted too, at a lower price: comparing two long texts a million times is an attack as
//! well. Values may be nested [`MAX_DEPTH`] deep, since the engine prints, compares and frees them by recursion, and
//! no value may hold a namespace or a loop, which could hold that value in turn.

use std::sync::Arc;

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{DynObject, Enumerator, Object, ObjectRepr, ValueKind},
};

use super::{integers::Digits, slice::View};

/// Price of a value that is visited, and of a place in a list.
pub(super) const NODE: u64 = 32;
/// Price of an entry of a map.
pub(super) const ENTRY: u64 = 160;
/// Price of any list, map or function that is made.
const OBJECT: u64 = 128;
/// Bytes that are read for the price of one byte made.
const READ: u64 = 4;
/// Bytes of the longest escape for one byte of a text inside a list.
const ESCAPE: u64 = 6;
/// Bytes of the longest number.
const NUMBER: u64 = 48;

/// Lists and maps within each other; JSON of requests may be nested 128 deep.
pub(super) const MAX_DEPTH: usize = 160;

/// A bound of the meter that a template ran into.
#[derive(Debug, thiserror::Error)]
pub(super) enum Excess {
    #[error("it makes more than {0} bytes of values")]
    Work(u64),
    #[error("it nests lists or maps more than {MAX_DEPTH} deep")]
    Depth,
    #[error("it puts a namespace or a loop into a value, which could then contain itself")]
    Cycle,
}

impl From<Excess> for Error {
    fn from(excess: Excess) -> Error {
        Error::new(ErrorKind::InvalidOperation, excess.to_string()).with_source(excess)
    }
}

/// The count of one rendering; lives in the engine's state.
pub(super) struct Meter {
    left: u64,
    limit: u64,
}

impl Meter {
    pub(super) fn spend(&mut self, bytes: u64) -> Result<(), Error> {
        self.left = self
            .left
            .checked_sub(bytes)
            .ok_or(Excess::Work(self.limit))?;
        Ok(())
    }

    /// Bytes that may still be made.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// Pays for reading a value to its end. Returns the bytes it takes when printed inside another.
    pub(super) fn walk(&mut self, value: &Value) -> Result<u64, Error> {
        self.walk_at(value, 0)
    }

    fn walk_at(&mut self, value: &Value, depth: usize) -> Result<u64, Error> {
        self.spend(NODE)?;
        if let Some(bytes) = text_bytes(value) {
            self.spend(bytes / READ)?;
            return Ok(ESCAPE * bytes + 4);
        }
        let Some(object) = value.as_object() else {
            return Ok(NUMBER);
        };
        if depth >= MAX_DEPTH {
            return Err(Excess::Depth.into());
        }
        if depth > 0 {
            holdable(value)?;
        }
        let mut printed = NUMBER;
        match object.repr() {
            ObjectRepr::Plain => {
                let digits = object.downcast_ref::<Digits>().map_or(0, Digits::len);
                printed += digits as u64;
            }
            ObjectRepr::Map => {
                for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                    let pair = self.walk_at(&key, depth + 1)? + self.walk_at(&item, depth + 1)?;
                    printed = printed.saturating_add(pair + 4);
                }
            }
            _ => {
                for item in object.try_iter().into_iter().flatten() {
                    let item = self.walk_at(&item, depth + 1)?;
                    printed = printed.saturating_add(item + 4);
                }
            }
        }
        Ok(printed)
    }

    /// Bytes of the value when printed by itself, paid for as reading only.
    pub(super) fn printed(&mut self, value: &Value) -> Result<u64, Error> {
        match text_bytes(value) {
            Some(bytes) => Ok(bytes),
            None if value.as_object().is_none() => Ok(NUMBER),
            None => self.walk(value),
        }
    }

    /// Pays for reading a value of which another instruction makes nothing large.
    pub(super) fn read(&mut self, value: &Value) -> Result<(), Error> {
        match text_bytes(value) {
            Some(bytes) => self.spend(bytes / READ),
            None if value.as_object().is_none() => Ok(()),
            None => self.walk(value).map(drop),
        }
    }

    /// Pays for a list, map or function that was made from values that exist.
    pub(super) fn made(&mut self, value: &Value) -> Result<(), Error> {
        let Some(object) = value.as_object() else {
            return Ok(());
        };
        let price = match object.repr() {
            ObjectRepr::Map => ENTRY,
            _ => NODE,
        };
        self.spend(OBJECT + price * object.enumerator_len().unwrap_or(0) as u64)?;
        if holds_objects(object) {
            self.walk(value)?;
        }
        Ok(())
    }

    /// A list that the engine would compute anew at each use, in the form of a list that is there. Chains of the
    /// former would be walked by recursion.
    pub(super) fn settle(&mut self, value: Value) -> Result<Value, Error> {
        if value.kind() != ValueKind::Iterable
            || value.downcast_object_ref::<Settled>().is_some()
            || value.downcast_object_ref::<Range>().is_some()
            || value.downcast_object_ref::<View>().is_some()
        {
            return Ok(value);
        }
        self.copied(&value)
    }

    /// A list of its own with the items of another.
    pub(super) fn copied(&mut self, value: &Value) -> Result<Value, Error> {
        self.spend(OBJECT)?;
        let mut items = Vec::new();
        for item in value.try_iter()?.checked() {
            self.spend(NODE)?;
            items.push(item?);
        }
        Ok(Value::from_object(Settled(items)))
    }
}

/// The meter of a rendering, which [`begin`] has put there.
pub(super) fn meter<'a>(state: &'a mut State) -> Result<&'a mut Meter, Error> {
    state.get_extension_mut().ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOperation,
            "templates are rendered with a meter",
        )
    })
}

/// Gives a rendering its meter. Only once, or a template could ask for another.
pub(super) fn begin(state: &mut State, limit: u64) -> Result<(), Error> {
    if state.get_extension::<Meter>().is_some() {
        return Err(Excess::Work(limit).into());
    }
    state.get_or_insert_extension(Meter { left: limit, limit });
    Ok(())
}

/// Bytes of a text, `None` for everything else.
pub(super) fn text_bytes(value: &Value) -> Option<u64> {
    value
        .as_str()
        .map(str::len)
        .or_else(|| value.as_bytes().map(<[u8]>::len))
        .map(|bytes| bytes as u64)
}

/// Refuses what could be made to contain itself.
pub(super) fn holdable(value: &Value) -> Result<(), Error> {
    let name = value.as_object().map_or("", DynObject::type_name);
    if name.ends_with("::Namespace") || name.ends_with("::Loop") {
        return Err(Excess::Cycle.into());
    }
    Ok(())
}

fn holds_objects(object: &DynObject) -> bool {
    match object.repr() {
        ObjectRepr::Plain => false,
        ObjectRepr::Map => object
            .try_iter_pairs()
            .into_iter()
            .flatten()
            .any(|(key, item)| key.as_object().is_some() || item.as_object().is_some()),
        _ => object
            .try_iter()
            .into_iter()
            .flatten()
            .any(|item| item.as_object().is_some()),
    }
}

/// Items of a repetition, a sum or another list that is no literal; to templates it is what the engine's is.
#[derive(Debug)]
struct Settled(Vec<Value>);

impl Object for Settled {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        item_at(key, self.0.len()).map(|at| self.0[at].clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

/// Numbers from `start` in steps; the engine's own computes the item at a place from all before it.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) start: i64,
    pub(super) step: i64,
    pub(super) len: usize,
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        item_at(key, self.len).map(|at| Value::from(self.start + self.step * at as i64))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len)
    }
}

/// Place that an index means, from the end where it is negative.
pub(super) fn item_at(key: &Value, len: usize) -> Option<usize> {
    let index = key.as_i64()?;
    let at = if index < 0 {
        len.checked_sub(usize::try_from(index.unsigned_abs()).ok()?)?
    } else {
        usize::try_from(index).ok()?
    };
    (at < len).then_some(at)
}
