use std::collections::BTreeSet;
use std::str::FromStr;

use super::families::{built_in, family_of, family_profile};
use super::{ArtifactFingerprint, Capability, ConfigFingerprint, Profile, ProfileError, runs_as};
use crate::{Checkpoint, Error, Result, graphs};

/// Which artifact a checkpoint is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ArtifactChoice {
    /// What its path tells.
    #[default]
    FromPath,
    /// None: exact profiles are not looked at.
    None,
    /// This one; the caller vouches for it.
    Is(ArtifactFingerprint),
}

impl FromStr for ArtifactChoice {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        match text {
            "none" => Ok(Self::None),
            _ => text.parse().map(Self::Is),
        }
    }
}

/// How profiles are resolved.
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    /// Which artifact the checkpoint is.
    pub artifact: ArtifactChoice,
    /// Exact profiles besides the built-in ones.
    pub extra: Vec<Profile>,
    /// What the engine can do.
    pub capabilities: BTreeSet<Capability>,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self {
            artifact: ArtifactChoice::default(),
            extra: Vec::new(),
            capabilities: Capability::ENGINE.iter().copied().collect(),
        }
    }
}

/// The profile of a checkpoint, and why it is that one.
///
/// It is an exact one if and only if [`Profile::artifact`] is there; then it is [`Resolution::artifact`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    profile: Profile,
    artifact: Option<ArtifactFingerprint>,
    config: ConfigFingerprint,
    missing: BTreeSet<Capability>,
    reason: String,
}

impl Resolution {
    /// Chooses a checkpoint's profile, and requires that the engine can run it.
    ///
    /// # Errors
    /// As [`Resolution::choose`] and [`Resolution::check_engine`].
    pub fn resolve(checkpoint: &Checkpoint, options: &ProfileOptions) -> Result<Self> {
        let chosen = Self::choose(checkpoint, options)?;
        chosen.check_engine(checkpoint)?;
        Ok(chosen)
    }

    /// Chooses a checkpoint's profile, whether the engine can run it or not: the exact profile of the
    /// artifact if there is one, else that of the family.
    ///
    /// # Errors
    /// When several exact profiles are for the artifact, the one there is does not fit the config, no family
    /// takes the config, or the config can't be read.
    pub fn choose(checkpoint: &Checkpoint, options: &ProfileOptions) -> Result<Self> {
        let config = ConfigFingerprint::of(checkpoint)?;
        let artifact = match &options.artifact {
            ArtifactChoice::FromPath => ArtifactFingerprint::from_path(checkpoint.dir()),
            ArtifactChoice::None => None,
            ArtifactChoice::Is(artifact) => Some(artifact.clone()),
        };
        let exact = match &artifact {
            Some(artifact) => exact_profile(checkpoint, artifact, config, &options.extra)?,
            None => None,
        };
        let (profile, reason) = match (exact, &artifact) {
            (Some(profile), _) => (profile, "the artifact has a profile of its own".to_owned()),
            (None, artifact) => {
                let family = family_of(checkpoint)?;
                let model_type = checkpoint.model_type()?;
                let alias = match runs_as(model_type) {
                    same if same == model_type => String::new(),
                    other => format!(", which mlx-lm runs as '{other}'"),
                };
                let why_no_exact = match artifact {
                    Some(_) => "the artifact has no profile of its own",
                    None => "not known to be a published artifact",
                };
                (family_profile(family, config), format!("model_type '{model_type}'{alias}; {why_no_exact}"))
            }
        };
        let missing = profile.required().difference(&options.capabilities).copied().collect();
        Ok(Self { profile, artifact, config, missing, reason })
    }

    /// Requires that the engine can run the profile.
    ///
    /// # Errors
    /// When it lacks a capability, an implementation, or a graph for the model type.
    pub fn check_engine(&self, checkpoint: &Checkpoint) -> Result<()> {
        let id = || self.profile.id().to_owned();
        if !self.missing.is_empty() {
            let missing = self.missing.iter().copied().collect();
            return Err(refused(checkpoint, ProfileError::EngineLacks { id: id(), missing }));
        }
        if let Some(name) = self.profile.specialization().implementation() {
            let name = name.to_owned();
            return Err(refused(checkpoint, ProfileError::Implementation { id: id(), name }));
        }
        graphs::check_supported(self.profile.graph(), checkpoint)
    }

    /// Requires that this was resolved for `checkpoint` and can be run.
    ///
    /// # Errors
    /// When the config is another one, or the engine lacks something.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<()> {
        let id = || self.profile.id().to_owned();
        let found = ConfigFingerprint::of(checkpoint)?;
        if found != self.config {
            let error = ProfileError::OtherConfig { id: id(), resolved: self.config, found };
            return Err(refused(checkpoint, error));
        }
        check_graph(&self.profile, checkpoint)?;
        self.check_engine(checkpoint)
    }

    /// The profile.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Which artifact the checkpoint is, if that is known.
    pub fn artifact(&self) -> Option<&ArtifactFingerprint> {
        self.artifact.as_ref()
    }

    /// The fingerprint of the checkpoint's config.
    pub fn config(&self) -> ConfigFingerprint {
        self.config
    }

    /// Whether the profile is the artifact's own.
    pub fn is_exact(&self) -> bool {
        self.profile.artifact().is_some()
    }

    /// What the profile requires and the engine lacks.
    pub fn missing(&self) -> &BTreeSet<Capability> {
        &self.missing
    }

    /// Why the profile was chosen, for people.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// The artifact's own profile, if there is one.
fn exact_profile(
    checkpoint: &Checkpoint,
    artifact: &ArtifactFingerprint,
    found: ConfigFingerprint,
    extra: &[Profile],
) -> Result<Option<Profile>> {
    let built_in = built_in();
    let is_for = |profile: &&Profile| profile.artifact().is_some_and(|a| a.fingerprint == *artifact);
    let matches: Vec<&Profile> = built_in.iter().chain(extra).filter(is_for).collect();
    let profile = match matches[..] {
        [] => return Ok(None),
        [profile] => profile,
        _ => {
            let ids = matches.iter().map(|profile| profile.id().to_owned()).collect();
            return Err(refused(checkpoint, ProfileError::Ambiguous { artifact: artifact.clone(), ids }));
        }
    };
    match profile.artifact() {
        Some(declared) if declared.config != found => Err(refused(
            checkpoint,
            ProfileError::Config {
                id: profile.id().to_owned(),
                artifact: artifact.clone(),
                declared: declared.config,
                found,
            },
        )),
        _ => check_graph(profile, checkpoint).map(|()| Some(profile.clone())),
    }
}

fn check_graph(profile: &Profile, checkpoint: &Checkpoint) -> Result<()> {
    if profile.graph().accepts(checkpoint) {
        return Ok(());
    }
    let error = ProfileError::Graph {
        id: profile.id().to_owned(),
        graph: profile.graph(),
        model_type: checkpoint.model_type()?.to_owned(),
    };
    Err(refused(checkpoint, error))
}

fn refused(checkpoint: &Checkpoint, source: ProfileError) -> Error {
    Error::Profile { path: checkpoint.dir().to_owned(), source }
}
