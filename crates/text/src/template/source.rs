//! Checks of a template's text, before it is compiled.
//!
//! The compiler works by recursion along chains of operators and branches, and computes what is constant: a few
//! hundred kilobytes of `1+1+1…` would exhaust the stack, and `'a' * 100000000` takes its hundred megabytes before
//! anything is rendered. No template that people use comes near these bounds.

use minijinja::{
    Value,
    machinery::{Token, ast, parse, tokenize},
    syntax::SyntaxConfig,
};

/// Bytes of a template; the published ones have 17,000.
const MAX_BYTES: usize = 1 << 20;
/// Tokens between two braces, and so the longest chain of operators.
const MAX_TAG_TOKENS: usize = 2_000;
/// Branches `elif` in the whole template.
const MAX_BRANCHES: usize = 500;
/// Bytes of a value that the compiler computes.
const MAX_CONSTANT_BYTES: u64 = 1 << 16;

/// A fault and its line.
pub(super) struct Fault {
    pub(super) line: usize,
    pub(super) reason: String,
}

/// Finds what the compiler could not bear. Text that is no template passes: the compiler says what is wrong with it.
pub(super) fn check(source: &str, syntax: &SyntaxConfig) -> Result<(), Fault> {
    if source.len() > MAX_BYTES {
        return Err(Fault {
            line: 0,
            reason: format!(
                "it has {} bytes, more than the {MAX_BYTES} that a template may have",
                source.len()
            ),
        });
    }
    check_chains(source, syntax)?;
    match parse(source, "", syntax.clone()) {
        Ok(template) => Checker.statement(&template),
        Err(_) => Ok(()),
    }
}

fn check_chains(source: &str, syntax: &SyntaxConfig) -> Result<(), Fault> {
    let (mut tokens, mut branches) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        let Ok((token, span)) = token else {
            return Ok(());
        };
        tokens += 1;
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => tokens = 0,
            Token::Ident("elif") if tokens == 1 => branches += 1,
            _ => {}
        }
        let reason = if tokens > MAX_TAG_TOKENS {
            format!("an expression of more than {MAX_TAG_TOKENS} words and operators")
        } else if branches > MAX_BRANCHES {
            format!("more than {MAX_BRANCHES} branches `elif`")
        } else {
            continue;
        };
        let line = span.start_line.into();
        return Err(Fault { line, reason });
    }
    Ok(())
}

/// Upper bounds of a value that the compiler would compute.
#[derive(Clone, Copy, Default)]
struct Constant {
    /// Of a text or list.
    bytes: u64,
    /// By which a text or list may be repeated.
    number: u64,
}

/// Price of an item, or of a number that is printed.
const ITEM: u64 = 48;

/// Walks a template in search of large constants and of calls whose arguments cannot be counted beforehand.
struct Checker;

type Checked = Result<(), Fault>;

impl Checker {
    fn statements(&self, all: &[ast::Stmt<'_>]) -> Checked {
        all.iter().try_for_each(|one| self.statement(one))
    }

    fn statement(&self, statement: &ast::Stmt<'_>) -> Checked {
        match statement {
            ast::Stmt::Template(it) => self.statements(&it.children),
            ast::Stmt::EmitExpr(it) => self.expression(&it.expr),
            ast::Stmt::EmitRaw(_) | ast::Stmt::Continue(_) | ast::Stmt::Break(_) => Ok(()),
            ast::Stmt::ForLoop(it) => {
                self.expression(&it.iter)?;
                self.optional(it.filter_expr.as_ref())?;
                self.statements(&it.body)?;
                self.statements(&it.else_body)
            }
            ast::Stmt::IfCond(it) => {
                self.expression(&it.expr)?;
                self.statements(&it.true_body)?;
                self.statements(&it.false_body)
            }
            ast::Stmt::WithBlock(it) => {
                it.assignments
                    .iter()
                    .try_for_each(|(_, value)| self.expression(value))?;
                self.statements(&it.body)
            }
            ast::Stmt::Set(it) => {
                self.expression(&it.target)?;
                self.expression(&it.expr)
            }
            ast::Stmt::SetBlock(it) => {
                self.optional(it.filter.as_ref())?;
                self.statements(&it.body)
            }
            ast::Stmt::AutoEscape(it) => {
                self.expression(&it.enabled)?;
                self.statements(&it.body)
            }
            ast::Stmt::FilterBlock(it) => {
                self.expression(&it.filter)?;
                self.statements(&it.body)
            }
            ast::Stmt::Block(it) => self.statements(&it.body),
            ast::Stmt::Import(it) => self.expression(&it.expr),
            ast::Stmt::FromImport(it) => self.expression(&it.expr),
            ast::Stmt::Extends(it) => self.expression(&it.name),
            ast::Stmt::Include(it) => self.expression(&it.name),
            ast::Stmt::Macro(it) => self.declaration(it),
            ast::Stmt::CallBlock(it) => {
                self.call(&it.call)?;
                self.declaration(&it.macro_decl)
            }
            ast::Stmt::Do(it) => self.call(&it.call),
        }
    }

    fn declaration(&self, it: &ast::Macro<'_>) -> Checked {
        it.defaults
            .iter()
            .try_for_each(|value| self.expression(value))?;
        self.statements(&it.body)
    }

    fn call(&self, it: &ast::Call<'_>) -> Checked {
        self.expression(&it.expr)?;
        self.arguments(&it.args)
    }

    fn arguments(&self, all: &[ast::CallArg<'_>]) -> Checked {
        all.iter().try_for_each(|argument| match argument {
            ast::CallArg::Pos(value) | ast::CallArg::Kwarg(_, value) => self.expression(value),
            ast::CallArg::PosSplat(value) | ast::CallArg::KwargSplat(value) => Err(Fault {
                line: value.span().start_line.into(),
                reason: "arguments unpacked with `*` or `**` are not supported".to_owned(),
            }),
        })
    }

    fn optional(&self, expression: Option<&ast::Expr<'_>>) -> Checked {
        expression.map_or(Ok(()), |expression| self.expression(expression))
    }

    fn expression(&self, expression: &ast::Expr<'_>) -> Checked {
        self.fold(expression).map(drop)
    }

    /// The constant that an expression is, if it is one.
    fn fold(&self, expression: &ast::Expr<'_>) -> Result<Option<Constant>, Fault> {
        let constant = match expression {
            ast::Expr::Const(it) => Some(Constant::of(&it.value)),
            ast::Expr::List(it) => self.fold_all(&it.items)?,
            ast::Expr::Tuple(it) => self.fold_all(&it.items)?,
            ast::Expr::Map(it) => {
                let (keys, values) = (self.fold_all(&it.keys)?, self.fold_all(&it.values)?);
                keys.zip(values).map(|(keys, values)| keys.and(values))
            }
            ast::Expr::UnaryOp(it) => self.fold(&it.expr)?,
            ast::Expr::BinOp(it) => {
                let sides = (self.fold(&it.left)?).zip(self.fold(&it.right)?);
                sides.map(|(left, right)| left.combined(it.op, right))
            }
            ast::Expr::Compare(it) => {
                self.fold(&it.expr)?;
                it.ops
                    .iter()
                    .try_for_each(|compared| self.expression(&compared.expr))?;
                Some(Constant {
                    bytes: 0,
                    number: 1,
                })
            }
            ast::Expr::Var(_) => None,
            ast::Expr::Slice(it) => {
                self.expression(&it.expr)?;
                for bound in [&it.start, &it.stop, &it.step] {
                    self.optional(bound.as_ref())?;
                }
                None
            }
            ast::Expr::IfExpr(it) => {
                self.expression(&it.test_expr)?;
                self.expression(&it.true_expr)?;
                self.optional(it.false_expr.as_ref())?;
                None
            }
            ast::Expr::Filter(it) => {
                self.optional(it.expr.as_ref())?;
                self.arguments(&it.args)?;
                None
            }
            ast::Expr::Test(it) => {
                self.expression(&it.expr)?;
                self.arguments(&it.args)?;
                None
            }
            ast::Expr::GetAttr(it) => {
                self.expression(&it.expr)?;
                None
            }
            ast::Expr::GetItem(it) => {
                self.expression(&it.expr)?;
                self.expression(&it.subscript_expr)?;
                None
            }
            ast::Expr::Call(it) => {
                self.call(it)?;
                None
            }
        };
        // A text that stands in the template is no larger than the template.
        let is_computed = matches!(expression, ast::Expr::BinOp(_));
        match constant {
            Some(constant) if is_computed && constant.bytes > MAX_CONSTANT_BYTES => Err(Fault {
                line: expression.span().start_line.into(),
                reason: format!("a constant of more than {MAX_CONSTANT_BYTES} bytes"),
            }),
            constant => Ok(constant),
        }
    }

    fn fold_all(&self, all: &[ast::Expr<'_>]) -> Result<Option<Constant>, Fault> {
        let mut list = Some(Constant::default());
        for expression in all {
            let item = self.fold(expression)?;
            list = list.zip(item).map(|(list, item)| list.and(item));
        }
        Ok(list)
    }
}

impl Constant {
    fn of(value: &Value) -> Constant {
        let number = f64::try_from(value.clone()).map_or(1, |number| number.abs().ceil() as u64);
        match value.as_str() {
            Some(text) => Constant {
                bytes: text.len() as u64,
                number: 0,
            },
            None => Constant { bytes: 0, number },
        }
    }

    /// A list with one more item.
    fn and(self, item: Constant) -> Constant {
        Constant {
            bytes: self.bytes.saturating_add(item.bytes + ITEM),
            number: 0,
        }
    }

    fn combined(self, op: ast::BinOpKind, other: Constant) -> Constant {
        let bytes = self.bytes.saturating_add(other.bytes);
        match op {
            ast::BinOpKind::Mul => Constant {
                bytes: (self.bytes.saturating_mul(other.number))
                    .max(other.bytes.saturating_mul(self.number)),
                number: self.number.saturating_mul(other.number),
            },
            ast::BinOpKind::Pow | ast::BinOpKind::Div | ast::BinOpKind::FloorDiv => Constant {
                bytes: 0,
                number: u64::MAX,
            },
            ast::BinOpKind::Concat => Constant {
                bytes: bytes.saturating_add(2 * ITEM),
                number: 0,
            },
            _ => Constant {
                bytes,
                number: self.number.saturating_add(other.number),
            },
        }
    }
}
