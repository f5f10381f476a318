use carat_model::backend::BackendError;

use super::Lowering;
use crate::fuse::Op;

impl Lowering<'_> {
    pub(super) fn narrow(&mut self, op: &Op) -> Result<(), BackendError> {
        self.plainly(op)
    }
}
