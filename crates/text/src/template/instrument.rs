//! Puts the meter into a template's compiled code.
//!
//! The engine counts steps, but one step can double a string, and it has no hook on its operators. So checks are placed
//! between its instructions. They compute nothing, so a template renders as it would without them; where the size of an
//! operand is known beforehand there is no check. Slices alone are replaced.
//!
//! Every instruction is listed here: one that a new version of the engine adds stops the build until somebody has
//! decided what it can cost.

use minijinja::{
    Value,
    machinery::{Instruction, Instructions},
    value::ValueKind,
};

use super::{checks::Check, meter::text_bytes};

/// Constants up to this size are read without a check.
const SMALL_BYTES: u64 = 256;
/// Characters up to this one are looked up without a check.
const NEAR: usize = 16;
/// Filters that the engine remembers by number.
const NUMBERED_FILTERS: usize = 50;

/// Cost of an instruction beyond its step.
enum Cost {
    Nothing,
    /// Text of the template, which the engine writes past the formatter.
    Raw(Value),
    /// A text or list made of the two topmost values.
    Operator(Check),
    Slice,
    /// A look at the topmost value or all of it.
    Top(Check),
    /// A look at the value below the topmost.
    Second(Check),
    /// A new list, map or macro.
    Made,
}

fn cost(instruction: &Instruction<'_>) -> Cost {
    use Instruction as I;
    match instruction {
        I::EmitRaw(text) => Cost::Raw(Value::from(*text)),
        I::StringConcat => Cost::Operator(Check::Concat),
        I::Add => Cost::Operator(Check::Add),
        I::Mul => Cost::Operator(Check::Mul),
        I::Slice => Cost::Slice,
        I::GetItem => Cost::Second(Check::Characters),
        // Recursion comes into a loop past this check, so it has one of its own.
        I::PushLoop(_) | I::FastRecurse | I::CallFunction("loop", Some(1)) => {
            Cost::Top(Check::Characters)
        }
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte | I::In | I::CompareAndPreserve(_) => {
            Cost::Top(Check::Read)
        }
        I::PerformTest("lower" | "upper", ..) => Cost::Top(Check::Read),
        I::PerformTest(_, Some(1), _) => Cost::Nothing,
        I::PerformTest(..) => Cost::Top(Check::Read),
        // What a namespace or a loop remembers must not hold that namespace or loop.
        I::SetAttr(_) => Cost::Second(Check::Hold),
        I::CallMethod("changed", _) => Cost::Top(Check::Hold),
        I::BuildMap(_) | I::BuildList(_) | I::BuildTuple(_) | I::BuildMacro(..) => Cost::Made,
        // Paid for by what they call, write or keep.
        I::ApplyFilter(..)
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(_)
        | I::BuildKwargs(_)
        | I::UnpackList(_)
        | I::Emit
        | I::BeginCapture(_)
        | I::EndCapture
        | I::CallBlock(_)
        | I::FastSuper
        // Refused when the template is read, or without another template to find.
        | I::MergeKwargs(_)
        | I::UnpackLists(_)
        | I::LoadBlocks
        | I::Include(_)
        | I::ExportLocals
        // Of a fixed size.
        | I::StoreLocal(_)
        | I::Lookup(_)
        | I::GetAttr(_)
        | I::LoadConst(_)
        | I::Sub
        | I::Div
        | I::IntDiv
        | I::Rem
        | I::Pow
        | I::Neg
        | I::Not
        | I::PushWith
        | I::Iterate(_)
        | I::PushDidNotIterate
        | I::PopFrame
        | I::PopLoopFrame
        | I::Jump(_)
        | I::JumpIfFalse(_)
        | I::JumpIfFalseOrPop(_)
        | I::JumpIfTrueOrPop(_)
        | I::PushAutoEscape
        | I::PopAutoEscape
        | I::DupTop
        | I::DiscardTop
        | I::Swap
        | I::Return
        | I::IsUndefined
        | I::Enclose(_)
        | I::GetClosure => Cost::Nothing,
    }
}

/// The same code with checks in it. `limit` is given to the meter at the start; blocks have none, they are called.
pub(super) fn with_checks<'s>(code: &Instructions<'s>, limit: Option<u64>) -> Instructions<'s> {
    let mut writer = Writer::new(code);
    if let Some(limit) = limit {
        writer.put(Instruction::LoadConst(Value::from(limit)));
        writer.check(Check::Begin, 1);
        writer.put(Instruction::DiscardTop);
    }
    while let Some(instruction) = code.get(writer.at) {
        writer.starts.push(writer.written.len() as u32);
        writer.put_checked(instruction);
        writer.at += 1;
    }
    writer.finish()
}

struct Writer<'a, 's> {
    code: &'a Instructions<'s>,
    /// Instruction of `code` that is being written.
    at: u32,
    /// With the instruction of `code` that each belongs to.
    written: Vec<(Instruction<'s>, u32)>,
    /// For each instruction of `code`, the place in `written` that jumps to it must reach.
    starts: Vec<u32>,
    /// Instructions that are jumped to: what stands before them need not have run.
    is_target: Vec<bool>,
    /// Number of the first check; filters of the template come before. None where there are too many of those.
    first_check: Option<u8>,
}

impl<'a, 's> Writer<'a, 's> {
    fn new(code: &'a Instructions<'s>) -> Writer<'a, 's> {
        let all = || (0..).map_while(|at| code.get(at));
        let mut is_target = vec![false; all().count() + 1];
        for target in all().filter_map(jump_target) {
            if let Some(slot) = is_target.get_mut(target as usize) {
                *slot = true;
            }
        }
        let numbers = all().filter_map(|instruction| match instruction {
            Instruction::ApplyFilter(_, _, number) => Some(usize::from(*number)),
            _ => None,
        });
        let first = numbers.max().map_or(0, |last| last + 1);
        Writer {
            code,
            at: 0,
            written: Vec::with_capacity(2 * is_target.len()),
            starts: Vec::with_capacity(is_target.len()),
            is_target,
            first_check: (first + Check::COUNT <= NUMBERED_FILTERS).then_some(first as u8),
        }
    }

    fn put(&mut self, instruction: Instruction<'s>) {
        self.written.push((instruction, self.at));
    }

    /// A check that takes the topmost values off the stack and puts one back.
    fn check(&mut self, check: Check, operands: u16) {
        // The engine looks a filter with this number up by its name.
        let number = self
            .first_check
            .map_or(u8::MAX, |first| first + check as u8);
        self.put(Instruction::ApplyFilter(
            check.name(),
            Some(operands),
            number,
        ));
    }

    fn put_checked(&mut self, instruction: &Instruction<'s>) {
        match cost(instruction) {
            Cost::Raw(text) => {
                self.put(Instruction::LoadConst(text));
                return self.put(Instruction::Emit);
            }
            Cost::Slice => return self.check(Check::Slice, 4),
            // With a number on the right the sum is a number, or an error.
            Cost::Operator(Check::Add) if self.top_is_number() => {}
            Cost::Operator(check) => {
                self.put(Instruction::BuildTuple(Some(2)));
                self.check(check, 1);
                self.put(Instruction::UnpackList(2));
                self.put(instruction.clone());
                if check != Check::Concat {
                    self.check(Check::Settle, 1);
                }
                return;
            }
            Cost::Second(Check::Characters) if self.top_is_near() => {}
            Cost::Second(check) => {
                self.put(Instruction::Swap);
                self.check(check, 1);
                self.put(Instruction::Swap);
            }
            Cost::Top(Check::Read) if self.top_is_small() => {}
            Cost::Top(check) => self.check(check, 1),
            Cost::Made => {
                self.put(instruction.clone());
                return self.check(Check::Made, 1);
            }
            Cost::Nothing => {}
        }
        self.put(instruction.clone());
    }

    /// The constant on top of the stack, where it is certainly one.
    fn top(&self) -> Option<&'a Value> {
        if self.is_target[self.at as usize] {
            return None;
        }
        match self.code.get(self.at.checked_sub(1)?)? {
            Instruction::LoadConst(value) => Some(value),
            _ => None,
        }
    }

    fn top_is_number(&self) -> bool {
        self.top()
            .is_some_and(|value| value.kind() == ValueKind::Number)
    }

    fn top_is_near(&self) -> bool {
        self.top().is_some_and(|key| {
            key.as_str().is_some() || key.as_usize().is_some_and(|index| index < NEAR)
        })
    }

    fn top_is_small(&self) -> bool {
        self.top().is_some_and(|value| {
            value.as_object().is_none() && text_bytes(value).unwrap_or(0) <= SMALL_BYTES
        })
    }

    fn finish(mut self) -> Instructions<'s> {
        self.starts.push(self.written.len() as u32);
        let mut checked = Instructions::new(self.code.name(), self.code.source());
        for (mut instruction, at) in self.written {
            if let Some(target) = jump_target(&instruction)
                && let Some(start) = self.starts.get(target as usize)
            {
                set_jump_target(&mut instruction, *start);
            }
            match (self.code.get_span(at), self.code.get_line(at)) {
                (Some(span), _) => checked.add_with_span(instruction, span),
                (None, Some(line)) => checked.add_with_line(instruction, line as u16),
                (None, None) => checked.add(instruction),
            };
        }
        checked
    }
}

/// The place in the code that an instruction names.
fn jump_target(instruction: &Instruction<'_>) -> Option<u32> {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => Some(*target),
        _ => None,
    }
}

fn set_jump_target(instruction: &mut Instruction<'_>, to: u32) {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => *target = to,
        _ => {}
    }
}
