//! A running `oracle/worker.py`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

/// A Python process that answers jobs, one line each. It ends when its standard input closes.
pub(crate) struct Worker {
    child: Child,
    jobs: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts `command`, which must run the script.
    pub(crate) fn start(mut command: Command) -> Result<Self, String> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("cannot run {command:?}: {e}"))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(jobs), Some(replies)) => Ok(Self { child, jobs, replies: BufReader::new(replies) }),
            _ => Err("the worker has no standard input or output".to_owned()),
        }
    }

    /// Runs one job. The outer error means that the process is lost, the inner one is the job's Python traceback.
    pub(crate) fn run(&mut self, job: &Value) -> Result<Result<(), String>, String> {
        let mut reply = String::new();
        let sent = writeln!(self.jobs, "{job}").and_then(|()| self.replies.read_line(&mut reply));
        if sent.is_err() || reply.is_empty() {
            return Err(format!("the oracle's worker died ({:?}) on {job}", self.child.wait()));
        }
        let reply: Value = serde_json::from_str(&reply).map_err(|e| format!("bad reply {reply:?}: {e}"))?;
        Ok(match reply.get("error") {
            Some(error) => Err(error.as_str().unwrap_or_default().to_owned()),
            None => Ok(()),
        })
    }
}
