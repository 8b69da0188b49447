//! What an engine can do, and how the parts of a model fit together.

use std::collections::BTreeSet;

use super::ids::ids;

ids! {
    /// Something that a profile may need and an engine may lack.
    pub enum Capability {
        /// Generating token after token.
        Autoregressive = "autoregressive",
        /// Reading colibri containers.
        ColibriContainer = "colibri-container",
        /// Generating by denoising a canvas of tokens.
        Diffusion = "diffusion",
        /// The graph diffusion-gemma.
        DiffusionGemmaGraph = "diffusion-gemma-graph",
        /// The graph gemma4.
        Gemma4Graph = "gemma4-graph",
        /// Graphs whose branches are resolved for one config. gemma4's are resolved at load, for any config: it
        /// brings this one too.
        GeneratedGraph = "generated-graph",
        /// The graph glm5.2.
        Glm52Graph = "glm5.2-graph",
        /// The graph minicpm5.
        MiniCpm5Graph = "minicpm5-graph",
        /// KV caches quantized layer by layer. Asked for by requests, never by built-in profiles.
        MixedPrecisionKv = "mixed-precision-kv",
        /// Drafting with a model's own head. Asked for by requests, never by built-in profiles.
        NativeMtp = "native-mtp",
        /// The graph qwen3.
        Qwen3Graph = "qwen3-graph",
        /// The graph qwen3-moe.
        Qwen3MoeGraph = "qwen3-moe-graph",
        /// The graph qwen3.5.
        Qwen35Graph = "qwen3.5-graph",
        /// Caches of recurrent layers.
        RecurrentState = "recurrent-state",
        /// Reading safetensors checkpoints.
        Safetensors = "safetensors",
        /// Experts that are read from disk as they are needed.
        StreamedExperts = "streamed-experts",
        /// The graph universal-dense.
        UniversalDenseGraph = "universal-dense-graph",
        /// Images through a checkpoint's vision tower.
        VisionSidecar = "vision-sidecar",
    }
}

impl Capability {
    /// What this engine can do. Whoever brings a capability adds its line.
    pub const ENGINE: &[Self] = &[
        // Loaders and loops
        Self::Autoregressive,
        Self::Safetensors,
        // Graphs, and what they need besides
        Self::Gemma4Graph,
        Self::GeneratedGraph,
        Self::MiniCpm5Graph,
        Self::Qwen3Graph,
        Self::Qwen3MoeGraph,
        Self::Qwen35Graph,
        Self::RecurrentState,
        Self::UniversalDenseGraph,
    ];
}

ids! {
    /// What reads a checkpoint's weights.
    pub enum LoaderKind {
        /// A GLM-5.2 container in colibri's layout.
        Colibri = "colibri",
        /// `model*.safetensors`.
        Safetensors = "safetensors",
    }
}

ids! {
    /// How tokens are generated.
    pub enum LoopKind {
        /// Token after token.
        Autoregressive = "autoregressive",
        /// By denoising a canvas of tokens.
        Diffusion = "diffusion",
    }
}

ids! {
    /// The computation of a model family.
    pub enum GraphKind {
        /// DiffusionGemma.
        DiffusionGemma = "diffusion-gemma",
        /// Gemma 4.
        Gemma4 = "gemma4",
        /// GLM-5.2.
        Glm52 = "glm5.2",
        /// MiniCPM5: a llama of one known shape.
        MiniCpm5 = "minicpm5",
        /// Qwen 3.
        Qwen3 = "qwen3",
        /// Qwen 3 with experts.
        Qwen3Moe = "qwen3-moe",
        /// Qwen 3.5: gated delta layers between attention layers, dense or with experts.
        Qwen35 = "qwen3.5",
        /// Dense decoders that one parametrized graph expresses.
        UniversalDense = "universal-dense",
    }
}

impl GraphKind {
    /// What reads the weights of this graph.
    pub fn loader(self) -> LoaderKind {
        match self {
            Self::Glm52 => LoaderKind::Colibri,
            Self::DiffusionGemma
            | Self::Gemma4
            | Self::MiniCpm5
            | Self::Qwen3
            | Self::Qwen3Moe
            | Self::Qwen35
            | Self::UniversalDense => LoaderKind::Safetensors,
        }
    }

    /// How this graph generates.
    pub fn loop_kind(self) -> LoopKind {
        match self {
            Self::DiffusionGemma => LoopKind::Diffusion,
            Self::Gemma4
            | Self::Glm52
            | Self::MiniCpm5
            | Self::Qwen3
            | Self::Qwen3Moe
            | Self::Qwen35
            | Self::UniversalDense => LoopKind::Autoregressive,
        }
    }

    /// What an engine must provide to run this graph, its loader and its loop included.
    pub fn capabilities(self) -> BTreeSet<Capability> {
        let loader = match self.loader() {
            LoaderKind::Colibri => Capability::ColibriContainer,
            LoaderKind::Safetensors => Capability::Safetensors,
        };
        let loop_kind = match self.loop_kind() {
            LoopKind::Autoregressive => Capability::Autoregressive,
            LoopKind::Diffusion => Capability::Diffusion,
        };
        let own: &[Capability] = match self {
            Self::DiffusionGemma => &[Capability::DiffusionGemmaGraph],
            Self::Gemma4 => &[Capability::Gemma4Graph],
            Self::Glm52 => &[Capability::Glm52Graph, Capability::StreamedExperts],
            Self::MiniCpm5 => &[Capability::MiniCpm5Graph],
            Self::Qwen3 => &[Capability::Qwen3Graph],
            Self::Qwen3Moe => &[Capability::Qwen3MoeGraph],
            Self::Qwen35 => &[Capability::Qwen35Graph, Capability::RecurrentState],
            Self::UniversalDense => &[Capability::UniversalDenseGraph],
        };
        own.iter().copied().chain([loader, loop_kind]).collect()
    }
}

/// How closely a graph is made for a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Specialization {
    /// For one artifact.
    Artifact {
        /// The implementation that computes it, where that is not the family's graph.
        implementation: Option<Implementation>,
    },
    /// For one family.
    Dedicated,
    /// For one config, its branches resolved.
    Generated,
    /// For many families.
    Generic,
}

impl Specialization {
    /// The ids of all specializations.
    pub const IDS: [&str; 4] = ["artifact", "dedicated", "generated", "generic"];

    /// The id that users read and write.
    pub fn id(&self) -> &'static str {
        match self {
            Self::Artifact { .. } => "artifact",
            Self::Dedicated => "dedicated",
            Self::Generated => "generated",
            Self::Generic => "generic",
        }
    }

    /// The name of the implementation, if it is not the family's graph.
    pub fn implementation(&self) -> Option<&str> {
        match self {
            Self::Artifact { implementation } => implementation.as_ref().map(Implementation::name),
            Self::Dedicated | Self::Generated | Self::Generic => None,
        }
    }
}

/// The name of code that an engine has for one artifact. A model's files never bring code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Implementation(String);

impl Implementation {
    /// A name; `None` if it is blank.
    pub fn new(name: &str) -> Option<Self> {
        (!name.trim().is_empty()).then(|| Self(name.to_owned()))
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.0
    }
}
