//! The oracle: one environment per test binary, shared by its tests, and a cache of everything it made.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde::Serialize;
use serde_json::json;

use crate::cases::Case;
use crate::environment::{self, Environment, digest};
use crate::reference::Reference;
use crate::specification::{
    BatchSpec, CacheSpec, EmbeddingSpec, FixtureSpec, Float, ReferenceSpec, RopeSpec, SamplerSpec,
};
use crate::worker::Worker;

/// Whether tests that need Python are skipped; the calling one is then reported on standard error.
pub(crate) fn is_skipped() -> bool {
    let skipped = std::env::var_os("RUSSET_SKIP_ORACLE").is_some_and(|value| value == "1");
    if skipped {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("a test that needs Python");
        // Not `eprintln!`: the test harness would swallow it.
        let _ = writeln!(std::io::stderr(), "skipped, because RUSSET_SKIP_ORACLE=1: {name}");
    }
    skipped
}

/// The reference implementation, ready to run.
///
/// Results are kept under `target/oracle/`, named by a digest of everything they depend on: the scripts, the packages,
/// the Python version, the specification and, for what was computed by a model, the processor (MLX picks kernels by it)
/// and the checkpoint. A result is made once; asking again reads the file and starts no Python.
pub struct Oracle {
    root: PathBuf,
    environment: Environment,
    /// Digest of the scripts and of the environment.
    scripts: String,
    /// What MLX may choose its kernels by.
    processor: String,
    idle: Mutex<Vec<Worker>>,
}

impl Oracle {
    /// The oracle, set up by the first caller. `None` only when `RUSSET_SKIP_ORACLE=1`: the calling test is then
    /// reported as skipped on standard error and should return.
    ///
    /// # Panics
    /// If Python or its packages cannot be had.
    pub fn get() -> Option<&'static Self> {
        static ORACLE: OnceLock<Result<Oracle, String>> = OnceLock::new();
        if is_skipped() {
            return None;
        }
        match ORACLE.get_or_init(Self::open) {
            Ok(oracle) => Some(oracle),
            Err(why) => panic!(
                "this test compares with the Python oracle, which could not be set up: {why}\n\
                 It needs Python 3.11 or newer with its venv and pip modules, and downloads the packages of \
                 oracle/requirements.txt once. Set RUSSET_SKIP_ORACLE=1 to skip the tests that need it."
            ),
        }
    }

    fn open() -> Result<Self, String> {
        let root = environment::oracle_dir();
        let environment = Environment::open(&root, &environment::scripts_dir().join("requirements.txt"))?;
        let tmp = root.join("tmp");
        fs::create_dir_all(&tmp).map_err(|e| format!("cannot create {}: {e}", tmp.display()))?;
        let scripts = environment::scripts_digest(&environment)?;
        let processor = environment::processor();
        Ok(Self { root, environment, scripts, processor, idle: Mutex::default() })
    }

    /// The folder of the checkpoint that `spec` describes.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn fixture(&self, spec: &FixtureSpec) -> PathBuf {
        self.make("fixture", "", spec, None).unwrap_or_else(|why| panic!("no fixture {spec:?}: {why}"))
    }

    /// The folder of a copy of the checkpoint in the folder `model` whose floating-point tensors are cast to `dtype`.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn cast(&self, model: &Path, dtype: Float) -> PathBuf {
        let spec = json!({ "dtype": dtype });
        let made = self.content_key(model).and_then(|key| self.make("cast", &key, &spec, Some(model)));
        made.unwrap_or_else(|why| panic!("cannot cast {} to {dtype:?}: {why}", model.display()))
    }

    /// What mlx-lm gives for `spec` on the checkpoint in the folder `model`.
    ///
    /// # Panics
    /// If it fails.
    pub fn reference(&self, model: &Path, spec: &ReferenceSpec) -> Reference {
        let made = self.content_key(model).and_then(|key| self.make("reference", &key, spec, Some(model)));
        let path = made.unwrap_or_else(|why| panic!("no reference {spec:?} on {}: {why}", model.display()));
        Reference::open(path)
    }

    /// The hidden states and the embedding of `spec` by the checkpoint in the folder `model`.
    ///
    /// # Panics
    /// If it fails.
    pub fn embedding(&self, model: &Path, spec: &EmbeddingSpec) -> Reference {
        let made = self.content_key(model).and_then(|key| self.make("embedding", &key, spec, Some(model)));
        let path = made.unwrap_or_else(|why| panic!("no embedding {spec:?} by {}: {why}", model.display()));
        Reference::open(path)
    }

    /// What mlx-lm's batch generator gives for `spec` on the checkpoint in the folder `model`.
    ///
    /// # Panics
    /// If it fails.
    pub fn batch(&self, model: &Path, spec: &BatchSpec) -> Reference {
        let made = self.content_key(model).and_then(|key| {
            let script = environment::script_digest("batch")?;
            self.make("batch", &format!("{key} {script}"), spec, Some(model))
        });
        Reference::open(made.unwrap_or_else(|why| panic!("no batch {spec:?} on {}: {why}", model.display())))
    }

    /// What mlx-lm's rotary embedding gives for `spec`.
    ///
    /// # Panics
    /// If it fails.
    pub fn rope(&self, spec: &RopeSpec) -> Reference {
        self.details("rope", spec)
    }

    /// What mlx-lm's sampler gives for `spec`, stage by stage.
    ///
    /// # Panics
    /// If it fails.
    pub fn sampler(&self, spec: &SamplerSpec) -> Reference {
        self.details("sampler", spec)
    }

    /// What mlx-lm's cache of one layer gives for `spec`, update by update.
    ///
    /// # Panics
    /// If it fails.
    pub fn cache(&self, spec: &CacheSpec) -> Reference {
        self.details("cache", spec)
    }

    /// Makes the fixtures and references of `cases` that do not exist yet, on all processor cores.
    ///
    /// # Panics
    /// If one fails.
    pub fn prepare(&self, cases: &[Case]) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                        self.reference(&self.fixture(&case.fixture), &case.reference);
                    }
                });
            }
        });
    }

    fn details<S: Serialize + std::fmt::Debug>(&self, job: &str, spec: &S) -> Reference {
        let made = self.make(job, "", spec, None);
        Reference::open(made.unwrap_or_else(|why| panic!("no {job} details {spec:?}: {why}")))
    }

    /// Names the contents of the checkpoint in `model`: one made here by its folder's name, another by its files.
    fn content_key(&self, model: &Path) -> Result<String, String> {
        if let Ok(name) = model.strip_prefix(&self.root) {
            return Ok(name.to_string_lossy().into_owned());
        }
        let io = |e: std::io::Error| format!("cannot read the checkpoint {}: {e}", model.display());
        let mut parts = Vec::new();
        for entry in fs::read_dir(model).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|e| e == "safetensors" || e == "json") {
                let contents = digest(&[fs::read(&path).map_err(io)?]);
                parts.push(format!("{} {contents}", path.file_name().unwrap_or_default().to_string_lossy()));
            }
        }
        parts.sort();
        Ok(digest(&parts))
    }

    /// The path of the result of a job, which is run if that does not exist. `dependencies` is what the result depends
    /// on beside the specification.
    fn make<S: Serialize>(
        &self,
        job: &str,
        dependencies: &str,
        spec: &S,
        model: Option<&Path>,
    ) -> Result<PathBuf, String> {
        let spec = serde_json::to_value(spec).map_err(|e| e.to_string())?;
        // Checkpoints are drawn and rounded by the same operations on every processor.
        let checkpoint = matches!(job, "fixture" | "cast");
        let processor = if checkpoint { "" } else { &self.processor };
        let key = digest(&[&self.scripts, processor, dependencies, &spec.to_string()]);
        let folder = self.root.join(job);
        let target = folder.join(if checkpoint { key } else { format!("{key}.safetensors") });
        if target.exists() {
            return Ok(target);
        }
        let io = |e: std::io::Error| format!("cannot write {}: {e}", target.display());
        fs::create_dir_all(&folder).map_err(io)?;
        let temporary = tempfile::Builder::new().prefix(".making-").tempdir_in(&folder).map_err(io)?;
        let out = temporary.path().join("out.safetensors");
        let mut request = json!({"job": job, "out": out, "spec": spec});
        if let Some(model) = model {
            request["model_dir"] = json!(model);
        }
        self.run_job(&request)?;
        match fs::rename(&out, &target) {
            // Another test made the same at the same time.
            Err(_) if target.exists() => Ok(target),
            result => result.map_err(io).map(|()| target.clone()),
        }
    }

    /// Runs one job on an idle worker, or on a new one.
    fn run_job(&self, job: &serde_json::Value) -> Result<(), String> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = idle().pop();
        let mut worker = match waiting {
            Some(worker) => worker,
            None => {
                let mut command = self.environment.command(&self.root);
                command.arg(environment::scripts_dir().join("worker.py"));
                Worker::start(command)?
            }
        };
        let result = worker.run(job)?;
        idle().push(worker);
        result
    }

    /// Runs the Python source `script` with `args` as `sys.argv[1:]` and `stdin` as its standard input; returns what
    /// it wrote to standard output. mlx, mlx-lm, transformers, tokenizers and jinja2 are importable.
    ///
    /// # Panics
    /// If the script fails; the message holds its standard error.
    pub fn run_script(&self, script: &str, args: &[&str], stdin: &str) -> String {
        let mut command = self.environment.command(&self.root);
        command.arg("-c").arg(script).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = command.spawn().and_then(|mut child| {
            let pipe = child.stdin.take();
            std::thread::scope(|scope| {
                // On a thread of its own, so that a script that writes before it has read everything does not block.
                // It may also end without reading: that is no error.
                scope.spawn(move || pipe.map(|mut pipe| pipe.write_all(stdin.as_bytes())));
                child.wait_with_output()
            })
        });
        let output = output
            .map_err(|e| format!("cannot run {}: {e}", self.environment.python.display()))
            .and_then(|output| environment::describe(&command, output))
            .unwrap_or_else(|why| panic!("{why}"));
        String::from_utf8(output.stdout).unwrap_or_else(|e| panic!("the script's output is not UTF-8: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokens;

    #[test]
    fn a_script_gets_its_arguments_and_its_input() {
        let Some(oracle) = Oracle::get() else { return };
        let script = "import sys, mlx_lm\nprint(sys.argv[1:], len(sys.stdin.read()), mlx_lm.__version__)";
        let printed = oracle.run_script(script, &["a", "ä"], &"x".repeat(300_000));
        assert_eq!(printed, "['a', 'ä'] 300000 0.32.2\n");
    }

    /// The message of the panic that `f` ends in.
    fn panic_of(f: impl FnOnce()) -> String {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_err();
        panic.downcast_ref::<String>().unwrap().clone()
    }

    #[test]
    fn a_failing_script_panics_with_its_error() {
        let Some(oracle) = Oracle::get() else { return };
        let message = panic_of(|| drop(oracle.run_script("raise ValueError('no such thing')", &[], "")));
        assert!(message.contains("ValueError: no such thing"), "{message}");
    }

    #[test]
    fn a_failing_job_panics_with_its_error_and_the_worker_goes_on() {
        let Some(oracle) = Oracle::get() else { return };
        let message = panic_of(|| drop(oracle.fixture(&FixtureSpec::new("no-such-architecture"))));
        assert!(message.contains("ValueError: unknown architecture no-such-architecture"), "{message}");
        let spec = FixtureSpec::new("llama");
        assert!(oracle.fixture(&spec).join("config.json").is_file());
    }

    #[test]
    fn a_cached_result_needs_no_python() {
        let Some(oracle) = Oracle::get() else { return };
        let fixture = FixtureSpec::new("llama");
        let spec = ReferenceSpec::new(Tokens::Random { count: 5, seed: 1 }, 2);
        let first = oracle.reference(&oracle.fixture(&fixture), &spec);

        let without_python = Oracle {
            root: oracle.root.clone(),
            environment: Environment {
                python: "/no/such/python".into(),
                key: oracle.environment.key.clone(),
            },
            scripts: oracle.scripts.clone(),
            processor: oracle.processor.clone(),
            idle: Mutex::default(),
        };
        let second = without_python.reference(&without_python.fixture(&fixture), &spec);
        assert_eq!(first.path(), second.path());
        let other = ReferenceSpec { steps: 3, ..spec };
        let message = panic_of(|| drop(without_python.reference(&without_python.fixture(&fixture), &other)));
        assert!(message.contains("/no/such/python"), "{message}");
    }

    #[test]
    fn a_reference_holds_the_logits_of_every_step() {
        let Some(oracle) = Oracle::get() else { return };
        let model = oracle.fixture(&FixtureSpec::new("llama"));
        let tokens = Tokens::Random { count: 5, seed: 1 };
        let spec =
            ReferenceSpec { dump_layers: true, dump_cache: true, ..ReferenceSpec::new(tokens.clone(), 2) };
        let reference = oracle.reference(&model, &spec);
        assert_eq!(
            reference.integers("prompt_tokens"),
            tokens.ids().iter().map(|&t| t as i32).collect::<Vec<_>>()
        );
        assert_eq!(reference.integers("tokens").len(), 3);
        assert_eq!(reference.array("prompt_logits").shape(), [512]);
        assert_eq!(reference.array("step_logits").shape(), [2, 512]);
        assert_eq!(reference.array("logprobs").shape(), [2, 512]);
        // Calls: the prompt but for its last token, that token, two steps.
        assert_eq!(reference.array("layer.000.001").shape(), [1, 4, 64]);
        assert_eq!(reference.array("layer.003.001").shape(), [1, 1, 64]);
        assert_eq!(reference.array("cache.001.0").shape(), [1, 2, 256, 16]);
        assert_eq!(reference.metadata()["mlx"], "0.32.4");
    }

    #[test]
    fn parts_of_the_reference_are_recorded_one_by_one() {
        let Some(oracle) = Oracle::get() else { return };
        let (_, rope) = crate::rope_specs().into_iter().find(|(name, _)| name.contains("yarn")).unwrap();
        let rope = oracle.rope(&rope);
        assert_eq!(rope.array("freqs").shape(), [8]);
        assert_eq!(rope.array("output.255").shape(), rope.array("input").shape());

        let (_, sampler) =
            crate::sampler_specs().into_iter().find(|(name, _)| name.contains("all filters")).unwrap();
        let recorded = oracle.sampler(&sampler);
        for name in ["logits", "logprobs", "top_p", "min_p", "xtc", "top_k"] {
            assert_eq!(recorded.array(name).shape(), [1, sampler.vocabulary as usize], "{name}");
        }
        assert_eq!(recorded.integers("draws").len(), sampler.draws as usize);
        assert_eq!(recorded.array("keys").shape(), [sampler.draws as usize, 2]);

        let spec = CacheSpec {
            max_size: Some(8),
            keep: 4,
            window: None,
            heads: 2,
            head_dim: 4,
            dtype: Float::Float32,
            seed: 0,
            steps: vec![6, -1, 3],
        };
        let cache = oracle.cache(&spec);
        assert_eq!(cache.integers("trimmed.001"), [1]);
        assert_eq!(cache.integers("state.002.2"), [8]); // its offset
        assert_eq!(cache.array("keys_out.002").shape(), [1, 2, 8, 4]);
    }

    #[test]
    fn a_cast_checkpoint_keeps_its_packed_weights() {
        let Some(oracle) = Oracle::get() else { return };
        let format = crate::Format::Affine { bits: 4, group: 32 };
        let model = oracle.fixture(&FixtureSpec { format, ..FixtureSpec::new("llama") });
        let weights = |dir: PathBuf| Reference::open(dir.join("model.safetensors"));
        let (before, after) = (weights(model.clone()), weights(oracle.cast(&model, Float::Float32)));
        let packed = "model.layers.0.mlp.up_proj.weight";
        assert_eq!(before.array(packed).data(), after.array(packed).data());
        assert_eq!(after.array("model.layers.0.mlp.up_proj.scales").dtype(), safetensors::Dtype::F32);
    }

    #[test]
    fn a_copied_checkpoint_shares_the_results_of_equal_ones_only() {
        let Some(oracle) = Oracle::get() else { return };
        let fixture = oracle.fixture(&FixtureSpec::new("llama"));
        let copy = |dir: &tempfile::TempDir| {
            for entry in fs::read_dir(&fixture).unwrap() {
                let path = entry.unwrap().path();
                fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
            oracle.content_key(dir.path()).unwrap()
        };
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(copy(&a), copy(&b));
        fs::write(b.path().join("config.json"), "{}").unwrap();
        assert_ne!(oracle.content_key(a.path()), oracle.content_key(b.path()));
    }
}
