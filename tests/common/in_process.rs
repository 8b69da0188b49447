//! A server in this process, on a graph of the test's own.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;

use russet_engine::{Engine, EngineOptions, LanguageModel};
use russet_model::graphs::Graph;
use russet_model::{Fidelity, LoadOptions};
use russet_server::{Error, ServerOptions, serve};
use russet_text::Tokenizer;
use tokio::sync::oneshot;

/// A server in this process.
pub(crate) struct InProcess {
    pub(crate) address: SocketAddr,
    pub(crate) thread: JoinHandle<Result<(), Error>>,
    stop: oneshot::Sender<()>,
}

impl InProcess {
    /// Serves the checkpoint of `dir` with another graph `around` its own.
    pub(crate) fn start(
        dir: String,
        around: impl FnOnce(Box<dyn Graph>, &Tokenizer) -> Box<dyn Graph> + Send + 'static,
        engine: EngineOptions,
        options: ServerOptions,
    ) -> Self {
        let load = move || {
            let loaded = LanguageModel::load(dir.as_ref(), &LoadOptions::new(Fidelity::Auto))?;
            let LanguageModel { model, tokenizer, eos } = loaded;
            let model = model.with_graph(|graph| around(graph, &tokenizer));
            Ok(LanguageModel { model, tokenizer, eos })
        };
        let engine = Arc::new(Engine::start(load, engine).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
            runtime.block_on(serve(listener, engine, options, async { drop(stopped.await) }))
        });
        Self { address, thread, stop }
    }

    pub(crate) fn finish(self) -> Result<(), Error> {
        let _ = self.stop.send(());
        self.thread.join().unwrap()
    }
}
