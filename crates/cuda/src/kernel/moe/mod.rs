//! Mixture of experts: routing, permutation of tokens by expert, products, weighted sum.

pub(crate) mod expert_tiles;
pub(crate) mod experts;
