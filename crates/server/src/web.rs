//! Files that are part of the server: the web chat and the description of the API. They hold no secrets, so that they
//! need no key.

use std::fmt::Write;
use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};

use crate::app::App;

/// A file.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) path: &'static str,
    content_type: &'static str,
    body: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";
const JSON: &str = "application/json";

static FILES: [File; 10] = [
    File { path: "/", content_type: HTML, body: include_str!("../web/index.html") },
    File { path: "/web/chat.css", content_type: CSS, body: include_str!("../web/chat.css") },
    File { path: "/web/chat.js", content_type: JAVASCRIPT, body: include_str!("../web/chat.js") },
    File { path: "/web/api.js", content_type: JAVASCRIPT, body: include_str!("../web/api.js") },
    File {
        path: "/web/conversations.js",
        content_type: JAVASCRIPT,
        body: include_str!("../web/conversations.js"),
    },
    File { path: "/web/dom.js", content_type: JAVASCRIPT, body: include_str!("../web/dom.js") },
    File { path: "/web/markdown.js", content_type: JAVASCRIPT, body: include_str!("../web/markdown.js") },
    File { path: "/web/message.js", content_type: JAVASCRIPT, body: include_str!("../web/message.js") },
    File { path: "/web/icon.svg", content_type: SVG, body: include_str!("../web/icon.svg") },
    File { path: "/openapi.json", content_type: JSON, body: include_str!("../openapi.json") },
];

/// What the page may do: run its own scripts, ask its own server, and nothing else. Text can't become markup even by a
/// mistake in a script (trusted types), and no other page may frame it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// The file at a path.
pub(crate) fn file(path: &str) -> Option<&'static File> {
    FILES.iter().find(|file| file.path == path)
}

/// The routes of all files.
pub(crate) fn routes(mut router: Router<Arc<App>>) -> Router<Arc<App>> {
    for file in &FILES {
        router = router.route(file.path, get(async move |headers: HeaderMap| respond(file, &headers)));
    }
    router
}

/// Browsers ask each time whether they have the newest version, which costs them nothing if they do.
fn respond(file: &File, asked: &HeaderMap) -> Response {
    let etag = etag(file.body);
    let has = |value: &str| value.split(',').any(|known| known.trim().trim_start_matches("W/") == etag);
    let is_known = asked.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok()).is_some_and(has);
    let headers = [
        (header::CONTENT_TYPE, file.content_type),
        (header::ETAG, &etag),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    if is_known {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, file.body).into_response()
}

fn etag(body: &str) -> String {
    let mut etag = String::from("\"");
    for byte in Sha256::digest(body).iter().take(16) {
        // Writing to a string does not fail.
        let _ = write!(etag, "{byte:02x}");
    }
    etag + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_another_one_names_is_served() {
        let of = |path: &str| file(path).unwrap_or_else(|| panic!("{path} is not served"));
        for asset in FILES.iter().filter(|file| file.path != "/openapi.json") {
            let folder = if asset.path == "/" { "/" } else { "/web/" };
            let names = asset.body.split('"').filter(|text| {
                [".js", ".css", ".svg"].iter().any(|end| text.ends_with(end))
                    && !text.contains(char::is_whitespace)
            });
            for name in names {
                assert!(!of(&format!("{folder}{}", name.trim_start_matches("./"))).body.is_empty());
            }
        }
    }
}
