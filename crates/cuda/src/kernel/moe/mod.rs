//! Mixture of experts: routing, permutation of tokens by expert, products, weighted sum.

pub(crate) mod experts;
pub(crate) mod permute;
