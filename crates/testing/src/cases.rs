//! The cases in which the engine must equal the oracle bit for bit.

use crate::specification::{FixtureSpec, ReferenceSpec};

/// A generation on a fixture.
#[derive(Clone, Debug)]
pub struct Case {
    /// What the case is about; unique in its list.
    pub name: String,
    /// The checkpoint.
    pub fixture: FixtureSpec,
    /// The generation.
    pub reference: ReferenceSpec,
}
