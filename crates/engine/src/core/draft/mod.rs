//! Drafts: what is proposed to follow a sequence, by whom, and how much of it is worth verifying.
//!
//! - [`suffix`]: prompt lookup, drafts from what the sequence repeats
//! - [`acceptance`]: how often drafts were right, by position
//! - [`costs`]: what rows cost, measured once
//! - [`pause`]: when to try again what did not pay
//! - [`policy`]: source and length of the next draft
//! - [`drafting`]: what one sequence knows of its drafts
//!
//! Nothing here has a part in which tokens an answer has: a draft is verified, and what the model would not have drawn is dropped.
//! Lengths follow from the history of acceptances and a table of costs, so the same history gives the same lengths.

mod acceptance;
mod costs;
mod drafting;
mod pause;
mod policy;
mod suffix;

pub use costs::StepCosts;
pub(crate) use drafting::Drafting;
pub(crate) use policy::{Decision, DraftPolicy, Load, Source};
