use super::{ArtifactFingerprint, Capability, ConfigFingerprint, GraphKind};

/// Why a profile is invalid, or a checkpoint can't be run with its profile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// A text that is no artifact fingerprint.
    #[error(
        "an artifact fingerprint is a text without spaces, such as \
         hf:owner/name@0123456789abcdef0123456789abcdef01234567"
    )]
    ArtifactFingerprint,
    /// A text that is no config fingerprint.
    #[error("a config fingerprint is 16 hexadecimal digits in lower case, as russet inspect prints it")]
    ConfigFingerprint,
    /// A profile without a name.
    #[error("a profile needs an id that is not empty and has no control characters")]
    Id,
    /// A profile that requires less than it needs.
    #[error(
        "profile '{id}' does not require what its composition needs: {}; add it to its capabilities",
        list(missing)
    )]
    Underdeclared {
        /// The profile.
        id: String,
        /// What it should require.
        missing: Vec<Capability>,
    },
    /// Several profiles for one artifact.
    #[error("several profiles are for artifact {artifact}: {}; keep one of them", ids.join(", "))]
    Ambiguous {
        /// The artifact.
        artifact: ArtifactFingerprint,
        /// The profiles.
        ids: Vec<String>,
    },
    /// An artifact whose config is not the one that its exact profile was made for.
    #[error(
        "profile '{id}' is for artifact {artifact} with config fingerprint {declared}, but this config's is \
         {found}; refusing to fall back. Fetch the artifact again, or call it by another name (--artifact none)"
    )]
    Config {
        /// The profile.
        id: String,
        /// The artifact.
        artifact: ArtifactFingerprint,
        /// The fingerprint in the profile.
        declared: ConfigFingerprint,
        /// The fingerprint of the config.
        found: ConfigFingerprint,
    },
    /// A profile whose graph does not compute this kind of model.
    #[error(
        "profile '{id}' has the graph {graph}, which does not run model_type '{}'; refusing to fall back",
        model_type.escape_debug()
    )]
    Graph {
        /// The profile.
        id: String,
        /// Its graph.
        graph: GraphKind,
        /// The model type of the config.
        model_type: String,
    },
    /// A profile that needs what the engine can't do.
    #[error("this engine lacks {}, which profile '{id}' requires; refusing to fall back", list(missing))]
    EngineLacks {
        /// The profile.
        id: String,
        /// What is missing.
        missing: Vec<Capability>,
    },
    /// A profile whose implementation the engine does not have.
    #[error(
        "this engine lacks the implementation '{}', which profile '{id}' names; refusing to fall back",
        name.escape_debug()
    )]
    Implementation {
        /// The profile.
        id: String,
        /// The implementation.
        name: String,
    },
    /// A profile that was resolved for another config than the one it should build.
    #[error("profile '{id}' was resolved for config fingerprint {resolved}, but this config's is {found}")]
    OtherConfig {
        /// The profile.
        id: String,
        /// The fingerprint it was resolved for.
        resolved: ConfigFingerprint,
        /// The fingerprint of the config.
        found: ConfigFingerprint,
    },
}

fn list(capabilities: &[Capability]) -> String {
    capabilities.iter().map(|c| c.id()).collect::<Vec<_>>().join(", ")
}
