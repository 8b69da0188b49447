//! Profiles: what a checkpoint resolves to before any weight is read.
//!
//! A [`Profile`] composes a loader, a graph, a loop and a specialization, states what an engine must be able
//! to do, and declares the tier that the composition promises. Most checkpoints get the profile of their
//! family; an exact artifact may have one of its own. Nothing falls back silently: an exact artifact that
//! does not fit its profile, and a profile that needs what the engine lacks, are errors.
//!
//! A profile says how a model is built and nothing else. Sampling, adapters and KV schemes are no part of it.

mod composition;
mod error;
mod families;
mod file;
mod fingerprint;
mod ids;
mod resolution;

use std::collections::BTreeSet;

pub use composition::{Capability, GraphKind, Implementation, LoaderKind, LoopKind, Specialization};
pub use error::ProfileError;
pub(crate) use families::runs_as;
pub use file::read_profiles;
pub use fingerprint::{ArtifactFingerprint, ConfigFingerprint};
pub use resolution::{ArtifactChoice, ProfileOptions, Resolution};

use crate::Tier;

/// How a model is composed and what that promises. A profile is valid once it exists, and never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    id: String,
    artifact: Option<Artifact>,
    tier: Tier,
    required: BTreeSet<Capability>,
    graph: GraphKind,
    specialization: Specialization,
}

/// The one artifact that an exact profile is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Its identity.
    pub fingerprint: ArtifactFingerprint,
    /// What its config must be.
    pub config: ConfigFingerprint,
}

impl Profile {
    /// A profile for one artifact. Loader and loop follow from the graph, oracle and claim from the tier.
    ///
    /// # Errors
    /// When the id is empty or has control characters, or `required` lacks what the composition implies.
    pub fn exact(
        id: &str,
        artifact: Artifact,
        tier: Tier,
        required: BTreeSet<Capability>,
        graph: GraphKind,
        specialization: Specialization,
    ) -> Result<Self, ProfileError> {
        if id.trim().is_empty() || id.chars().any(char::is_control) {
            return Err(ProfileError::Id);
        }
        let missing: Vec<Capability> =
            Self::implied(graph, &specialization).difference(&required).copied().collect();
        if !missing.is_empty() {
            return Err(ProfileError::Underdeclared { id: id.to_owned(), missing });
        }
        Ok(Self { id: id.to_owned(), artifact: Some(artifact), tier, required, graph, specialization })
    }

    /// The capabilities that a composition needs at least.
    fn implied(graph: GraphKind, specialization: &Specialization) -> BTreeSet<Capability> {
        let mut implied = graph.capabilities();
        match specialization {
            Specialization::Generated => drop(implied.insert(Capability::GeneratedGraph)),
            Specialization::Artifact { .. } | Specialization::Dedicated | Specialization::Generic => {}
        }
        implied
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The artifact it is for, unless it is for a family.
    pub fn artifact(&self) -> Option<&Artifact> {
        self.artifact.as_ref()
    }

    /// The tier that the composition promises.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// What an engine must be able to do.
    pub fn required(&self) -> &BTreeSet<Capability> {
        &self.required
    }

    /// The computation.
    pub fn graph(&self) -> GraphKind {
        self.graph
    }

    /// How closely the graph is made for the checkpoint.
    pub fn specialization(&self) -> &Specialization {
        &self.specialization
    }
}
