//! The files of the server: the web chat in a real browser, the OpenAPI document beside real answers.

mod common;

use std::path::PathBuf;

use common::embedding_model;
use common::http::{Server, ask};
use russet_testing::client_script;

const KEY: &str = "a-key-of-its-own";

/// Chromium or Chrome; `None`, with a word about it, where there is neither. Where everything must be tested
/// (`CI=true`) that is a failure.
#[expect(clippy::print_stderr, reason = "a skipped test must say so")]
fn browser() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let on_path = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    let applications = [
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    ];
    let found = on_path.chain(applications.map(PathBuf::from)).find(|program| program.is_file());
    if found.is_none() {
        let problem = "no chromium or google-chrome is on the path (Debian: apt-get install chromium)";
        assert!(std::env::var_os("CI").is_none_or(|value| value != "true"), "{problem}");
        eprintln!("skipped: {problem}");
    }
    found
}

#[test]
fn the_web_chat_works_in_a_browser() {
    let (Some(browser), Some(mut script)) = (browser(), client_script("web_chat.py")) else { return };
    let (open, keyed, doomed) = (Server::start(&[]), Server::start(&["--api-key", KEY]), Server::start(&[]));
    let pid = doomed.child.id().to_string();
    script.arg(browser).args([&open.url(), &keyed.url(), KEY, &doomed.url(), &pid]);
    let output = script.output().unwrap();
    let print = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", print(&output.stdout), print(&output.stderr));
    assert!(print(&output.stdout).lines().count() >= 15, "{}", print(&output.stdout));
}

#[test]
fn files_are_cached_and_locked_down() {
    let server = Server::start(&["--api-key", KEY]);
    for (path, content_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/web/chat.css", "text/css; charset=utf-8"),
        ("/web/chat.js", "text/javascript; charset=utf-8"),
        ("/web/icon.svg", "image/svg+xml"),
        ("/openapi.json", "application/json"),
    ] {
        let get = |headers: &[(&str, &str)]| ask(server.address, "GET", path, headers, "");
        // Without the key: it is the page that asks for it.
        let file = get(&[]);
        assert_eq!((file.status, file.headers["content-type"].as_str()), (200, content_type), "{path}");
        assert_eq!(file.headers["content-length"], file.body.len().to_string());
        assert_eq!(file.headers["x-content-type-options"], "nosniff");
        assert_eq!(file.headers["cache-control"], "no-cache");
        let policy = &file.headers["content-security-policy"];
        for rule in
            ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'none'"]
        {
            assert!(policy.split("; ").any(|other| other == rule), "{rule} is not in {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        let etag = &file.headers["etag"];
        for known in [etag.clone(), format!("\"other\", W/{etag}")] {
            let same = get(&[("If-None-Match", &known)]);
            assert_eq!((same.status, same.body.as_str()), (304, ""), "{path} {known}");
            assert_eq!(&same.headers["etag"], etag);
        }
        assert_eq!(get(&[("If-None-Match", "\"other\"")]).status, 200);
        let head = ask(server.address, "HEAD", path, &[], "");
        assert_eq!((head.status, head.body.as_str()), (200, ""));
        assert_eq!(
            ask(server.address, "POST", path, &[], "").fails(405),
            format!("{path} does not take POST")
        );
    }
    assert_eq!(ask(server.address, "GET", "/web/", &[], "").status, 401);
    assert_eq!(ask(server.address, "GET", "/web/../etc/passwd", &[], "").status, 401);
}

#[test]
fn the_openapi_document_is_true() {
    let (Some(mut script), Some(model)) = (client_script("openapi.py"), embedding_model()) else { return };
    let (server, embedding) = (Server::start(&["-n", "8"]), Server::of(&model.arg(), &[]));
    let output = script.args([&server.url(), &embedding.url()]).output().unwrap();
    let print = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", print(&output.stdout), print(&output.stderr));
    assert!(print(&output.stdout).contains("check_with_schemathesis"), "{}", print(&output.stdout));
}
