//! Build script shared by every package that links MLX into an executable or a test.
//!
//! Link arguments of a library do not reach the binaries that use it, so each package emits the
//! run-time search path again: the place where `russet-mlx` found MLX, and the layout of a shipped
//! folder (`bin/russet` beside `lib/mlx/lib`).
#![allow(clippy::print_stdout)]

fn main() {
    println!("cargo:rerun-if-env-changed=DEP_MLX_LIB");
    let Ok(lib) = std::env::var("DEP_MLX_LIB") else { return };
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    // For tests that compile against MLX's headers.
    println!("cargo:rustc-env=MLX_INCLUDE={lib}/../include");
    let origin = if cfg!(target_os = "macos") { "@loader_path" } else { "$ORIGIN" };
    println!("cargo:rustc-link-arg=-Wl,-rpath,{origin}/../lib/mlx/lib");
}
