//! `list[start:stop:step]` and `text[start:stop:step]`.
//!
//! The engine's own slice of a list computes all items before the one asked for, at each use, and a slice of a slice
//! keeps both: templates that cut the conversation in every round make that quadratic, hostile ones a stack overflow. A
//! [`View`] is a place in a list. Texts and tuples are copied, as the engine does.

use std::sync::Arc;

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Enumerator, Object, ObjectRepr, Tuple, ValueKind},
};

use super::meter::{self, NODE, item_at, text_bytes};

/// Part of a list, in its order or backwards. To templates it is what the engine makes of a slice.
#[derive(Debug)]
pub(super) struct View {
    /// Whole, with each item at hand.
    list: Value,
    bounds: Bounds,
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = item_at(key, self.bounds.count)?;
        self.list.get_item_by_index(self.bounds.at(at)).ok()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.bounds.count)
    }
}

/// Items of a slice: the first one, the distance to the next, and how many.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    first: usize,
    step: i64,
    count: usize,
}

impl Bounds {
    /// Python's meaning of the three numbers, for something of `len` items.
    fn new(start: Option<i64>, stop: Option<i64>, step: i64, len: usize) -> Bounds {
        let len = len as i64;
        let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let place = |bound: i64| {
            let from_start = if bound < 0 {
                bound.saturating_add(len)
            } else {
                bound
            };
            from_start.clamp(low, high)
        };
        let (start, stop) = if step > 0 {
            (start.map_or(low, place), stop.map_or(high, place))
        } else {
            (start.map_or(high, place), stop.map_or(low, place))
        };
        let distance = if step > 0 { stop - start } else { start - stop };
        Bounds {
            first: start.max(0) as usize,
            step,
            count: (distance.max(0) as u64).div_ceil(step.unsigned_abs()) as usize,
        }
    }

    fn at(self, place: usize) -> usize {
        (self.first as i64 + self.step.wrapping_mul(place as i64)) as usize
    }
}

/// The filter that stands for the instruction: a value and three numbers, each of which may be none.
pub(super) fn slice(
    state: &mut State,
    value: Value,
    start: &Value,
    stop: &Value,
    step: &Value,
) -> Result<Value, Error> {
    let number = |value: &Value| -> Result<Option<i64>, Error> {
        if value.is_none() {
            return Ok(None);
        }
        i64::try_from(value.clone()).map(Some)
    };
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "cannot slice by step size of 0",
        ));
    }
    let meter = meter::meter(state)?;
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::String => {
            // Four bytes per character to have each at hand, and the copy.
            meter.spend(5 * text_bytes(&value).unwrap_or(0))?;
            let characters: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            let bounds = Bounds::new(start, stop, step, characters.len());
            let text: String = (0..bounds.count)
                .map(|place| characters[bounds.at(place)])
                .collect();
            Ok(Value::from(text))
        }
        ValueKind::Seq | ValueKind::Iterable if value.is_tuple() => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let bounds = Bounds::new(start, stop, step, items.len());
            meter.spend(NODE * (items.len() as u64 + 4))?;
            let items: Vec<Value> = (0..bounds.count)
                .map(|place| items[bounds.at(place)].clone())
                .collect();
            Ok(Value::from(Tuple::from(items)))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let list = match value.downcast_object_ref::<View>() {
                // A view of a view is copied, so that views do not form chains.
                Some(_) => meter.copied(&value)?,
                None => meter.settle(value)?,
            };
            meter.spend(4 * NODE)?;
            let bounds = Bounds::new(start, stop, step, list.len().unwrap_or(0));
            Ok(Value::from_object(View { list, bounds }))
        }
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("value of type {kind} cannot be sliced"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::Bounds;

    /// Checked with Python's `list(range(len))[start:stop:step]`.
    #[test]
    fn bounds_are_pythons() {
        let items = |start, stop, step, len| -> Vec<usize> {
            let bounds = Bounds::new(start, stop, step, len);
            (0..bounds.count).map(|place| bounds.at(place)).collect()
        };
        assert_eq!(items(None, None, 1, 3), [0, 1, 2]);
        assert_eq!(items(Some(1), None, 1, 3), [1, 2]);
        assert_eq!(items(Some(-2), None, 1, 3), [1, 2]);
        assert_eq!(items(None, Some(-1), 1, 3), [0, 1]);
        assert_eq!(items(Some(5), Some(9), 1, 3), [0; 0]);
        assert_eq!(items(Some(-9), Some(9), 2, 5), [0, 2, 4]);
        assert_eq!(items(None, None, -1, 3), [2, 1, 0]);
        assert_eq!(items(Some(-2), None, -1, 4), [2, 1, 0]);
        assert_eq!(items(None, Some(0), -1, 3), [2, 1]);
        assert_eq!(items(Some(9), Some(0), -2, 5), [4, 2]);
        assert_eq!(items(Some(0), Some(2), -1, 3), [0; 0]);
        assert_eq!(items(None, None, i64::MIN, 3), [2]);
        assert_eq!(items(None, None, i64::MAX, 3), [0]);
        assert_eq!(items(Some(i64::MIN), Some(i64::MAX), 1, 2), [0, 1]);
        assert_eq!(items(None, None, -1, 0), [0; 0]);
    }
}
