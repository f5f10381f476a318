//! The engine's filters, functions and Python's methods, each behind its price.
//!
//! All filters are listed, so that those which other filters call by name (`map`, `select`) pay too. The function
//! `debug` is left out: it prints all there is.

use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters, functions,
    value::{Rest, ValueOrKwargs},
};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{
    meter::{self, Range},
    price::Price,
    python,
};

/// Most numbers in a range, as in the engine.
const LONGEST_RANGE: usize = 100_000;

pub(super) fn add_to(environment: &mut Environment<'static>) {
    add_filters(environment);
    environment.remove_global("debug");
    environment.add_function("range", range);
    add_maker(environment, "dict", Value::from_function(functions::dict));
    let namespace = Value::from_function(functions::namespace);
    add_maker(environment, "namespace", namespace);
    environment.set_unknown_method_callback(|state, value, method, args| {
        let price = Price::of_method(value.kind(), method);
        let mut all = vec![value.clone()];
        all.extend_from_slice(args);
        if price == Price::Join {
            // The separator has the method, the list is the argument.
            all.reverse();
        }
        price.pay(meter::meter(state)?, &all)?;
        let made = match python::stripped(value, method, args) {
            Some(stripped) => stripped,
            None => unknown_method_callback(state, value, method, args)?,
        };
        price.receive(meter::meter(state)?, made)
    });
}

fn add_filters(environment: &mut Environment<'static>) {
    let mut add = |name: &'static str, price: Price, filter: Value| {
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            price.pay(meter::meter(state)?, &args)?;
            let made = filter.call(state, &args)?;
            price.receive(meter::meter(state)?, made)
        });
    };
    macro_rules! add_all {
        ($($price:expr => $($name:ident)*;)*) => {
            $($(add(stringify!($name), $price, Value::from_function(filters::$name));)*)*
        };
    }
    add_all! {
        Price::Read => length abs int float round first last attr bool default;
        // Some characters become three in the other case.
        Price::Text(3) => lower upper title capitalize;
        // And one becomes `&quot;`.
        Price::Text(6) => escape;
        Price::Print => string pprint safe;
        Price::Items => list reverse chain;
        Price::List => sort unique min max;
        Price::Nest => items zip groupby;
        Price::Each => select selectattr reject rejectattr map;
        Price::Sum => sum;
        Price::Replace => replace;
        Price::Join => join;
        Price::Split => split lines;
        Price::Indent => indent;
        Price::Format => format;
        Price::Batch => batch slice;
    }
    add("trim", Price::Text(1), Value::from_function(python::trim));
    add(
        "dictsort",
        Price::Nest,
        Value::from_function(python::dict_sort),
    );
    add("e", Price::Text(6), Value::from_function(filters::escape));
    add("count", Price::Read, Value::from_function(filters::length));
    add("d", Price::Read, Value::from_function(filters::default));
}

/// Adds a function whose result holds its arguments.
fn add_maker(environment: &mut Environment<'static>, name: &'static str, function: Value) {
    environment.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        let meter = meter::meter(state)?;
        args.iter().try_for_each(|arg| meter.made(arg))?;
        function.call(state, &args)
    });
}

/// As the engine's, but each number comes from its place alone, and no argument makes it overflow.
fn range(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let refuse = |why| Err(Error::new(ErrorKind::InvalidOperation, why));
    let (start, stop) = second.map_or((0, first), |second| (first, second));
    let step = step.unwrap_or(1);
    if step == 0 {
        return refuse("cannot create range with step of 0");
    }
    let distance = if step > 0 {
        i128::from(stop) - i128::from(start)
    } else {
        i128::from(start) - i128::from(stop)
    };
    let count = u128::try_from(distance)
        .unwrap_or(0)
        .div_ceil(step.unsigned_abs().into());
    match usize::try_from(count) {
        Ok(len) if len <= LONGEST_RANGE => Ok(Value::from_object(Range { start, step, len })),
        _ => refuse("range has too many elements"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filters_of(environment: &Environment<'_>) -> Vec<String> {
        let shown = format!("{environment:?}");
        let (_, filters) = shown.split_once("filters: ").unwrap();
        let (filters, _) = filters.split_once(", templates").unwrap();
        let quoted = filters.split('"').skip(1).step_by(2);
        quoted.map(str::to_owned).collect()
    }

    /// One that is missing here would be called without paying.
    #[test]
    fn every_filter_of_the_engine_has_a_price() {
        let mut priced = Environment::empty();
        add_to(&mut priced);
        let priced = filters_of(&priced);
        let all = filters_of(&Environment::new());
        assert!(all.len() > 40, "{all:?}");
        // `tojson` is our own.
        let missing: Vec<_> = all
            .iter()
            .filter(|name| *name != "tojson" && !priced.contains(name))
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
