//! The command line.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueHint};
use russet_hub::Store;
use russet_model::profile::{ArtifactChoice, ProfileOptions, read_profiles};
use russet_model::{CpuOptions, Fidelity, KvType, LoadOptions, Precision};
use russet_text::ToolParser;

/// Local inference for MLX checkpoints.
#[derive(Parser)]
#[command(
    name = "russet",
    version,
    propagate_version = true,
    after_help = "A MODEL is a checkpoint folder, OWNER/NAME or a unique part of such a name in the Hugging Face \
                  cache or in Russet's own store. Without one, the starter model SmolLM2-135M-Instruct is \
                  used, and installed on first use.\n\n\
                  Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Answer one prompt
    Run(RunArgs),
    /// Talk to a model
    Chat(ChatArgs),
    /// Serve a model over HTTP, with OpenAI's protocol and a web chat
    Serve(Box<ServeArgs>),
    /// Turn texts into embeddings
    Embed(EmbedArgs),
    /// Show what a checkpoint is and what it needs
    Inspect(InspectArgs),
    /// Say whether a model and a context fit in memory
    Fit(FitArgs),
    /// List the models on this machine
    Ls(LsArgs),
    /// Measure prefill and decode speed
    Bench(BenchArgs),
    /// Record logits and compare recordings
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Where models come from.
#[derive(Args)]
pub(crate) struct StoreArgs {
    /// Never use the network; say what is missing instead
    #[arg(long)]
    pub(crate) offline: bool,

    /// Folder of Russet's own model store
    #[arg(long, value_name = "DIR", env = "RUSSET_HOME", value_hint = ValueHint::DirPath)]
    pub(crate) home: Option<PathBuf>,
}

impl StoreArgs {
    /// The user's models.
    pub(crate) fn open(&self) -> Result<Store, russet_hub::Error> {
        // An empty RUSSET_HOME is none.
        Store::from_env(self.home.clone().filter(|home| !home.as_os_str().is_empty()))
    }
}

/// What every command that runs a model takes.
#[derive(Args)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// auto (l1 on a GPU, l3 on a CPU), l1 (bit-exact with mlx-lm), l2 (bit-exact with mlx-optiq) or l3
    /// (measured error, fast)
    #[arg(long, value_name = "TIER", default_value = "auto")]
    pub(crate) fidelity: Fidelity,

    /// Prompt tokens per prefill call [default: 2048 at l1, 256 at l3]
    #[arg(long, value_name = "N", alias = "prefill-step-size", value_parser = at_least_one)]
    pub(crate) prefill_chunk: Option<usize>,

    /// Threads of the CPU kernels [default: the physical cores]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub(crate) threads: Option<usize>,

    /// Precision of activations in the CPU kernels' products with quantized weights
    #[arg(long, value_enum, value_name = "PRECISION", default_value_t = Activations::Int16)]
    pub(crate) activations: Activations,

    /// What the CPU kernels keep keys and values in
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = KvCache::F16)]
    pub(crate) kv_cache: KvCache,

    /// Which artifact the model is, for the profiles of exact artifacts: a fingerprint such as
    /// hf:owner/name@revision, or none [default: what the path of a Hugging Face snapshot tells]
    #[arg(long, value_name = "FINGERPRINT")]
    pub(crate) artifact: Option<ArtifactChoice>,

    /// JSON file with profiles of exact artifacts, besides the built-in ones
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) profiles: Option<PathBuf>,

    /// Compute from the mapped weights as stored: slower, without memory of their own for the weights
    #[arg(long)]
    pub(crate) no_repack: bool,
}

/// Precision of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Activations {
    /// As they are
    F32,
    /// 16-bit integers per 32 values, nearly lossless
    Int16,
    /// The same, but 12 bits for prompts where the processor has matrix registers (AMX): faster, and less exact
    Int12,
}

/// The type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KvCache {
    /// Half the memory
    F16,
    /// Exact
    F32,
}

impl ModelArgs {
    pub(crate) fn load_options(&self) -> Result<LoadOptions, russet_model::Error> {
        let profile = ProfileOptions {
            artifact: self.artifact.clone().unwrap_or_default(),
            extra: self.profiles.as_deref().map(read_profiles).transpose()?.unwrap_or_default(),
            ..ProfileOptions::default()
        };
        Ok(LoadOptions { fidelity: self.fidelity, cpu: self.cpu_options(), profile })
    }

    pub(crate) fn cpu_options(&self) -> CpuOptions {
        CpuOptions {
            threads: self.threads,
            precision: match self.activations {
                Activations::F32 => Precision::F32,
                Activations::Int16 => Precision::Int16,
                Activations::Int12 => Precision::Int12,
            },
            interleave: !self.no_repack,
            kv: match self.kv_cache {
                KvCache::F16 => KvType::F16,
                KvCache::F32 => KvType::F32,
            },
        }
    }
}

/// How tokens are picked. Names and meanings are mlx-lm's; what is omitted comes from the model's
/// generation_config.json, then from the default.
#[derive(Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Temperature; 0 picks the most likely token [default: the model's, else 0]
    #[arg(long, value_name = "T", alias = "temperature", allow_negative_numbers = true)]
    pub(crate) temp: Option<f64>,
    /// Keep the most likely tokens that together reach this probability [default: the model's, else off]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f64>,
    /// Keep the K most likely tokens [default: the model's, else off]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub(crate) top_k: Option<i32>,
    /// Keep tokens at least this fraction as likely as the best [default: the model's, else off]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f64>,
    /// Tokens that --min-p always keeps [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) min_tokens_to_keep: Option<i32>,
    /// Chance of excluding top choices [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) xtc_probability: Option<f64>,
    /// Probability above which --xtc-probability excludes [default: 0.1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) xtc_threshold: Option<f64>,
    /// Make recent tokens less likely, by factor [default: the model's, else off]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f64>,
    /// How many recent tokens --repetition-penalty looks at [default: 20]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) repetition_context_size: Option<i32>,
    /// Make recent tokens less likely, once per token [default: off]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f64>,
    /// How many recent tokens --presence-penalty looks at [default: 20]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) presence_context_size: Option<i32>,
    /// Make recent tokens less likely, per occurrence [default: off]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f64>,
    /// How many recent tokens --frequency-penalty looks at [default: 20]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) frequency_context_size: Option<i32>,
    /// Add BIAS to the logit of token ID; may be repeated
    #[arg(long, value_name = "ID:BIAS", value_parser = parse_bias, allow_negative_numbers = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Seed of the sampler [default: random]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
}

/// How a conversation becomes a prompt and when its answer ends.
#[derive(Args)]
pub(crate) struct PromptArgs {
    /// System message
    #[arg(long, value_name = "TEXT", alias = "system-prompt")]
    pub(crate) system: Option<String>,
    /// Values for the chat template, as a JSON object
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub(crate) chat_template_config: Option<serde_json::Map<String, serde_json::Value>>,
    /// Tokens of an answer, at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    pub(crate) max_tokens: usize,
    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

#[derive(Args)]
pub(crate) struct RunArgs {
    /// MODEL and PROMPT. A single one is taken as a MODEL if it names one, else as the PROMPT for the
    /// starter model; a missing prompt is read from standard input
    #[arg(value_names = ["MODEL", "PROMPT"], num_args = 0..=2)]
    pub(crate) positionals: Vec<String>,
    /// The model, instead of the first positional
    #[arg(short, long)]
    pub(crate) model: Option<String>,
    /// The prompt, instead of the last positional; - reads standard input
    #[arg(short, long)]
    pub(crate) prompt: Option<String>,
    /// Give the prompt to the model as it is, without chat template
    #[arg(long, alias = "ignore-chat-template", conflicts_with_all = ["system", "chat_template_config"])]
    pub(crate) raw: bool,
    /// Print one JSON object with text, tokens and timings instead of streaming
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) prompting: PromptArgs,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Args)]
pub(crate) struct ChatArgs {
    /// The model [default: the starter model]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) prompting: PromptArgs,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Args)]
#[command(after_help = SERVE_HELP)]
pub(crate) struct ServeArgs {
    /// The model [default: the starter model]
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// The model, instead of the positional
    #[arg(short, long = "model", value_name = "MODEL", conflicts_with = "model")]
    pub(crate) model_option: Option<String>,

    /// Address or name to listen on; one that other machines reach needs a key
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", help_heading = "Network")]
    pub(crate) host: String,
    /// Port to listen on; 0 takes any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8080, help_heading = "Network")]
    pub(crate) port: u16,
    /// Key that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Others on this machine can read a
    /// command line: the variable or --api-key-file is safer
    #[arg(
        long,
        value_name = "KEY",
        env = "RUSSET_API_KEY",
        hide_env_values = true,
        help_heading = "Network"
    )]
    pub(crate) api_key: Option<String>,
    /// File with that key
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Network")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Let other machines use the server without a key
    #[arg(long, help_heading = "Network")]
    pub(crate) insecure: bool,
    /// Name that clients may use for this server in the Host header, besides --host, localhost and addresses; may be
    /// repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',', help_heading = "Network")]
    pub(crate) allowed_host: Vec<String>,
    /// Origin of web pages that may use the server, such as `https://example.org`, or * for all; may be repeated
    #[arg(
        long,
        value_name = "ORIGIN",
        alias = "allowed-origins",
        value_delimiter = ',',
        help_heading = "Network"
    )]
    pub(crate) allowed_origin: Vec<String>,
    /// Connections at once; others wait
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one, help_heading = "Network")]
    pub(crate) max_connections: usize,
    /// Size of a request's body, at most
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = parse_size, help_heading = "Network")]
    pub(crate) max_body_bytes: usize,

    /// Requests that are answered at once
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one, help_heading = "Serving")]
    pub(crate) decode_concurrency: usize,
    /// Requests that wait; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one, help_heading = "Serving")]
    pub(crate) queue: usize,
    /// Memory for the states of prompts that may come again; 0 keeps none
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size, help_heading = "Serving")]
    pub(crate) prompt_cache_bytes: usize,
    /// Keep the states of answers there too: the next turn of a chat begins sooner, but its last bits, and so
    /// sometimes its text, depend on what was asked before
    #[arg(long, help_heading = "Serving")]
    pub(crate) prompt_cache_answers: bool,
    /// Memory for weights and all requests [default: what the machine has free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Serving")]
    pub(crate) memory_budget: Option<usize>,
    /// End requests after this time, with status 504 [default: never]
    #[arg(
        long,
        value_name = "SECONDS",
        value_parser = RangedU64ValueParser::<u64>::new().range(1..=86_400),
        help_heading = "Serving"
    )]
    pub(crate) request_timeout: Option<u64>,
    /// How long requests may go on after ctrl-C or SIGTERM
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 10,
        value_parser = RangedU64ValueParser::<u64>::new().range(0..=86_400),
        help_heading = "Serving"
    )]
    pub(crate) shutdown_timeout: u64,
    /// What is logged to standard error
    #[arg(
        long,
        value_enum,
        value_name = "LEVEL",
        ignore_case = true,
        default_value_t = LogLevel::Info,
        help_heading = "Serving"
    )]
    pub(crate) log_level: LogLevel,
    /// How it is logged
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text, help_heading = "Serving")]
    pub(crate) log_format: LogFormat,
    /// Log prompts and answers too
    #[arg(long, help_heading = "Serving")]
    pub(crate) log_prompts: bool,

    /// Tokens of an answer, at most, where a request does not say
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        default_value_t = 512,
        value_parser = at_least_one,
        help_heading = "Answers"
    )]
    pub(crate) max_tokens: usize,
    /// Values for the chat template, as a JSON object; requests add to them with chat_template_kwargs
    #[arg(
        long,
        value_name = "JSON",
        alias = "chat-template-config",
        value_parser = parse_object,
        help_heading = "Answers"
    )]
    pub(crate) chat_template_args: Option<serde_json::Map<String, serde_json::Value>>,
    /// Markup in which the model calls tools [default: what its chat template shows]
    #[arg(long, value_name = "NAME", value_parser = tool_parser(), help_heading = "Answers")]
    pub(crate) tool_parser: Option<ToolParser>,

    /// Taken for mlx_lm.server's sake, without effect
    #[arg(long, hide = true)]
    pub(crate) use_default_chat_template: bool,
    /// The same
    #[arg(long, hide = true)]
    pub(crate) trust_remote_code: bool,
    /// The same
    #[arg(long, hide = true, value_name = "N")]
    pub(crate) prompt_concurrency: Option<usize>,
    /// The same
    #[arg(long, hide = true, value_name = "N")]
    pub(crate) prompt_cache_size: Option<usize>,

    #[command(flatten)]
    pub(crate) loading: ModelArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

const SERVE_HELP: &str = "\
Sampling options are defaults for requests that do not say.

Options of mlx_lm.server have their names and meanings here, with these differences. Sampling that is not given comes \
from the model's generation_config.json. --allowed-origins is empty by default, not *. --prefill-step-size is what \
fidelity l1 or l3 needs by default. Without --seed each request that has none gets a random one. Taken without effect: \
--prompt-concurrency (prompts are read one at a time, between steps of the answers), --prompt-cache-size (only bytes \
are limited), --use-default-chat-template, and --trust-remote-code (no code of a checkpoint is ever run). Not taken: \
--adapter-path, --draft-model, --num-draft-tokens, --chat-template, --kv-bits and its companions, --pipeline.

Exit codes: 0 after ctrl-C or SIGTERM, 1 when the engine fails, 2 wrong usage, 130 or 143 after a second signal.

A browser finds a web chat at /, and clients a description of the API at /openapi.json.

Endpoints: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /health, /stats, /metrics, /version; \
docs/http-api.md describes them.";

/// What is logged, in Python's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogLevel {
    /// Also broken connections
    Debug,
    /// Each request
    Info,
    /// What is refused and may be a fault
    #[value(alias = "warn")]
    Warning,
    /// What failed
    Error,
    /// The same
    #[value(hide = true)]
    Critical,
}

/// The shape of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people
    Text,
    /// An object a line
    Json,
}

#[derive(Args)]
pub(crate) struct EmbedArgs {
    /// An embedding model with last-token pooling, such as Qwen3-Embedding
    pub(crate) model: String,
    /// The texts; without any, each line of standard input is one
    #[arg(value_name = "TEXT")]
    pub(crate) texts: Vec<String>,
    /// The texts are queries, not documents: put the model's query prompt before them
    #[arg(long)]
    pub(crate) query: bool,
    /// The texts are queries for this task, described in one sentence
    #[arg(long, value_name = "TASK", conflicts_with = "query")]
    pub(crate) instruction: Option<String>,
    /// Keep the first N numbers of each embedding, scaled to length one [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) dimensions: Option<usize>,
    /// Print one JSON object with the embeddings and token counts instead of a JSON list per text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
}

#[derive(Args)]
pub(crate) struct InspectArgs {
    /// The model [default: the starter model]
    pub(crate) model: Option<String>,
    /// Context length to compute memory for
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    pub(crate) context: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
}

#[derive(Args)]
#[command(after_help = "Exit codes: 0 it fits, 1 it does not, or the model can't be loaded.")]
pub(crate) struct FitArgs {
    /// The model [default: the starter model]
    pub(crate) model: Option<String>,
    /// Tokens of a sequence, prompt and answer together
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) context: u32,
    /// Sequences that run at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = RangedU64ValueParser::<u32>::new().range(1..=4096))]
    pub(crate) sequences: u32,
    /// Memory that may be used, such as 8GB or 512MiB [default: what the machine has free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) memory_budget: Option<usize>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
}

#[derive(Args)]
pub(crate) struct LsArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args)]
pub(crate) struct BenchArgs {
    /// The model [default: the starter model]
    pub(crate) model: Option<String>,
    /// Prompt length
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub(crate) prompt_tokens: usize,
    /// Generated tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    pub(crate) gen_tokens: usize,
    /// Sequences at once; rates are those of all together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub(crate) sequences: usize,
    /// Measured runs, after one that is not counted
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub(crate) runs: usize,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
}

#[derive(Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one")]
pub(crate) enum EvalCommand {
    /// Record logits of a prompt and of the steps after it in a safetensors file
    Logits(EvalLogitsArgs),
    /// Compare two recordings; exits with 1 when any bit differs
    Compare(EvalCompareArgs),
    /// Measure the error of fidelity l3 on a text, against the f32 computation of the same weights
    Error(EvalErrorArgs),
}

#[derive(Args)]
pub(crate) struct EvalLogitsArgs {
    /// The model [default: the starter model]
    #[arg(short, long)]
    pub(crate) model: Option<String>,
    /// Prompt: ids 1,2,3, @FILE with such a list, or rand:COUNT:SEED:HIGH: random ids below HIGH;
    /// SEED and HIGH may be left out
    #[arg(long, value_name = "LIST")]
    pub(crate) tokens: String,
    /// One-token steps after the prompt
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) steps: u32,
    /// File to write, with the extension .safetensors
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Args)]
pub(crate) struct EvalCompareArgs {
    /// The recording to compare with
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) a: PathBuf,
    /// The recording to judge
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) b: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct EvalErrorArgs {
    /// The model [default: the starter model]
    #[arg(short, long)]
    pub(crate) model: Option<String>,
    /// Text to read
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) text: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) loading: ModelArgs,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse::<u32>() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n as usize),
        Err(e) => Err(format!("{e}")),
    }
}

/// A number of bytes, with a unit as mlx_lm.server takes it (KB, MB, GB are powers of 1000) or one of powers of 1024.
fn parse_size(text: &str) -> Result<usize, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let factor = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1.0,
        "K" | "KB" => 1e3,
        "M" | "MB" => 1e6,
        "G" | "GB" => 1e9,
        "T" | "TB" => 1e12,
        "KIB" => 1024.0,
        "MIB" => 1_048_576.0,
        "GIB" => 1_073_741_824.0,
        "TIB" => 1_099_511_627_776.0,
        _ => return Err("expected a number of bytes, KB, MB, GB, KiB, MiB or GiB, for example 2GiB".into()),
    };
    let number: f64 = number.parse().map_err(|_| format!("'{number}' is not a number"))?;
    let bytes = number * factor;
    if bytes >= 9e15 {
        return Err("that is more than any memory".into());
    }
    Ok(bytes as usize)
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once(':').ok_or("expected ID:BIAS, for example 42:-5.5")?;
    let id = id.trim().parse().map_err(|e| format!("token id '{id}': {e}"))?;
    let bias = bias.trim().parse().map_err(|e| format!("bias '{bias}': {e}"))?;
    Ok((id, bias))
}

fn tool_parser() -> impl TypedValueParser<Value = ToolParser> {
    let names = PossibleValuesParser::new(ToolParser::ALL.map(ToolParser::name));
    names.try_map(|name| name.parse::<ToolParser>())
}

fn parse_object(text: &str) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    serde_json::from_str(text).map_err(|e| format!("expected a JSON object: {e}"))
}
