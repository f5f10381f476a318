//! The checks that stand between a template's instructions.
//!
//! Each is a filter under a name that no template can write. It gets operands, pays for what an instruction is about to
//! make of them and hands them on. `map` and its like call filters by name, so a template can reach a check with values
//! of its own; it then pays for nothing.

use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    value::{Tuple, ValueKind, ValueOrKwargs},
};

use super::{
    meter::{self, Meter, NODE, text_bytes},
    slice,
};

/// A place in the code at which the meter is called.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// Before everything else: a number becomes the meter's limit.
    Begin,
    /// Before `~`.
    Concat,
    /// Before `+`.
    Add,
    /// Before `*`.
    Mul,
    /// In place of a slice.
    Slice,
    /// Before a loop over, or a look into, what may be a text: its characters are counted.
    Characters,
    /// Before a value is compared or searched.
    Read,
    /// After a list, map or macro is made.
    Made,
    /// After an operator that may have made a list which is computed at each use.
    Settle,
    /// Before a namespace or loop remembers a value.
    Hold,
}

impl Check {
    pub(super) const COUNT: usize = 10;

    pub(super) fn name(self) -> &'static str {
        match self {
            Check::Begin => "<meter>",
            Check::Concat => "~",
            Check::Add => "+",
            Check::Mul => "*",
            Check::Slice => "[:]",
            Check::Characters => "[]",
            Check::Read => "==",
            Check::Made => "{}",
            Check::Settle => "[*]",
            Check::Hold => ".=",
        }
    }
}

/// Makes the checks known to the environment.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter(Check::Begin.name(), meter::begin);
    environment.add_filter(Check::Slice.name(), slice::slice);
    environment.add_filter(Check::Settle.name(), |state: &mut State, value: Value| {
        meter::meter(state)?.settle(value)
    });

    let mut add_operands = |check: Check, pay: fn(&mut Meter, &Tuple) -> Result<(), Error>| {
        environment.add_filter(check.name(), move |state: &mut State, operands: &Value| {
            let operands = operands.downcast_object_ref::<Tuple>().ok_or_else(|| {
                Error::new(ErrorKind::InvalidOperation, "checks are for operators")
            })?;
            pay(meter::meter(state)?, operands)?;
            // Unpacking puts the first one on top of the stack.
            let reversed: Vec<Value> = operands.iter().rev().cloned().collect();
            Ok(Value::from(Tuple::from(reversed)))
        });
    };
    add_operands(Check::Concat, |meter, operands| {
        operands.iter().try_for_each(|operand| {
            let bytes = meter.printed(operand)?;
            meter.spend(bytes)
        })
    });
    add_operands(Check::Add, |meter, operands| {
        operands
            .iter()
            .try_for_each(|operand| meter.spend(copied_bytes(operand)))
    });
    add_operands(Check::Mul, |meter, operands| {
        let times = operands.iter().filter_map(Value::as_usize).max();
        let times = times.unwrap_or(1) as u64;
        operands
            .iter()
            .try_for_each(|operand| meter.spend(copied_bytes(operand).saturating_mul(times)))
    });

    let mut add_value = |check: Check, pay: fn(&mut Meter, &Value) -> Result<(), Error>| {
        environment.add_filter(
            check.name(),
            move |state: &mut State, value: ValueOrKwargs| {
                pay(meter::meter(state)?, &value)?;
                Ok::<_, Error>(value.into_value())
            },
        );
    };
    add_value(Check::Characters, |meter, value| match value.kind() {
        ValueKind::String => meter.read(value),
        _ => Ok(()),
    });
    add_value(Check::Read, Meter::read);
    add_value(Check::Made, Meter::made);
    add_value(Check::Hold, |_, value| meter::holdable(value));
}

/// Bytes of a copy of a text or list; nothing else is copied by an operator.
fn copied_bytes(value: &Value) -> u64 {
    match value.kind() {
        ValueKind::String | ValueKind::Bytes => text_bytes(value).unwrap_or(0),
        ValueKind::Seq | ValueKind::Iterable => NODE * (value.len().unwrap_or(0) as u64 + 1),
        _ => 0,
    }
}
