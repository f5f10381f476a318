//! Places in a schema, as JSON pointers.

use std::fmt;

/// The way from the root of a schema to a place in it.
#[derive(Clone, Copy)]
pub(crate) enum Path<'a> {
    Root,
    Key(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl<'a> Path<'a> {
    pub(crate) fn key(&'a self, key: &'a str) -> Path<'a> {
        Path::Key(self, key)
    }

    pub(crate) fn index(&'a self, index: usize) -> Path<'a> {
        Path::Index(self, index)
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root => f.write_str("#"),
            Path::Key(before, key) => {
                let key = key.replace('~', "~0").replace('/', "~1");
                write!(f, "{before}/{key}")
            }
            Path::Index(before, index) => write!(f, "{before}/{index}"),
        }
    }
}
