//! Constraints on an answer, token by token: grammars and schemas, seen from the scheduler.

use std::{fmt, sync::Arc};

use carat_model::{TokenId, sampling::TokenMask};

/// Says which tokens may come next. Made outside of the scheduler, which asks it between two steps: whoever has much to compute
/// does so ahead, on a thread of its own.
pub trait Constraint: Send {
    /// The answer goes on with this token, which was allowed or forced.
    fn accept(&mut self, token: TokenId);

    /// Allows the tokens that may come next; the mask comes without any. If none is allowed the request ends
    /// ([`FinishReason::DeadEnd`](super::FinishReason)).
    fn mask(&mut self, mask: &mut TokenMask);

    /// The only token that may come next, if it is to be taken without asking the model: it is fed like a token of the prompt,
    /// and asked again after it. A grammar that is complete forces a stop token.
    fn forced(&self) -> Option<TokenId> {
        None
    }

    /// One in the same state, to follow a draft that may turn out wrong.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// Makes the constraint of a request when it is accepted. Cloning a request shares it.
#[derive(Clone)]
pub struct ConstraintSource(Arc<dyn Fn() -> Box<dyn Constraint> + Send + Sync>);

impl ConstraintSource {
    /// `start` makes one that has accepted nothing yet.
    pub fn new(start: impl Fn() -> Box<dyn Constraint> + Send + Sync + 'static) -> Self {
        ConstraintSource(Arc::new(start))
    }

    /// One that has accepted nothing yet.
    pub fn start(&self) -> Box<dyn Constraint> {
        (self.0)()
    }
}

impl fmt::Debug for ConstraintSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConstraintSource")
    }
}
