//! Finds or fetches MLX and compiles the C++ side of the binding.
//!
//! MLX is taken as its makers distribute it, from the Python package index, so that Russet links the
//! very library that the Python reference runs. In order: `MLX_DIR` (an unpacked `mlx` folder with
//! `include` and `lib`), an `mlx` of the pinned version that `python3` can import, and a download of
//! the pinned wheel by pip, hash-checked, into a per-user cache.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const VERSION: &str = "0.32.4";

/// A wheel of MLX: package, platform tag, sha256.
struct Wheel(&'static str, &'static str, &'static str);

const WHEELS: &[Wheel] = &[
    Wheel(
        "mlx-cpu",
        "manylinux_2_35_x86_64",
        "0e0a24fa2ce8b6b94d2e6a90604e8813aa8e29fcb918bb2aa01cfb6d133d8cee",
    ),
    Wheel(
        "mlx-cpu",
        "manylinux_2_35_aarch64",
        "1289e85e64af1fd16380bf331438bfe4afe875d27afc3e0bcf35f427c488fadd",
    ),
    Wheel(
        "mlx-cuda-12",
        "manylinux_2_35_x86_64",
        "f385c7af7c1f63a9d6ce3e442e1c9ba881c881bcb45c6534ff8155b359da47e5",
    ),
    Wheel(
        "mlx-cuda-12",
        "manylinux_2_35_aarch64",
        "cea869b007c809013c369819d485e3b534f3ecc261199b4c655ef92a21f73f28",
    ),
    Wheel(
        "mlx-cuda-13",
        "manylinux_2_35_x86_64",
        "94cb48fba73e5ee39467e51c35c51c691123359ca17bafd1a24cf92ad6732bee",
    ),
    Wheel(
        "mlx-cuda-13",
        "manylinux_2_35_aarch64",
        "cf8a67b49cebff85cd98b1d118c09f6c8ee966b899a914c50cc74d614b25616e",
    ),
    Wheel(
        "mlx-metal",
        "macosx_14_0_arm64",
        "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947",
    ),
    Wheel(
        "mlx-metal",
        "macosx_15_0_arm64",
        "9f0a3cc26d89724434d9684932fc6f3e4e83669d2a895d858ed2c8a55eb84e8b",
    ),
    Wheel(
        "mlx-metal",
        "macosx_26_0_arm64",
        "514df92d41a286895d2564b4b18f4da45096bd7a4a0c47e1042f345ad5a7f936",
    ),
];

fn main() {
    for path in ["build.rs", "cpp/shim.h", "cpp/shim.cpp", "src/bridge.rs"] {
        println!("cargo:rerun-if-changed={path}");
    }
    println!("cargo:rerun-if-env-changed=MLX_DIR");
    println!("cargo:rerun-if-env-changed=RUSSET_MLX_CACHE");

    let dir = find_mlx().unwrap_or_else(|message| panic!("{message}"));
    let include = dir.join("include");
    let lib = dir.join("lib");

    cxx_build::bridge("src/bridge.rs")
        .file("cpp/shim.cpp")
        .include("cpp")
        // -isystem: MLX's headers are not ours to warn about.
        .flag("-isystem")
        .flag(include.to_str().expect("MLX path is not UTF-8"))
        .std("c++20")
        .compile("russet_mlx_shim");

    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=dylib=mlx");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    // Read as DEP_MLX_LIB by the packages that link executables (build/rpath.rs).
    println!("cargo:lib={}", lib.display());
}

/// The `mlx` folder with `include/` and `lib/`.
fn find_mlx() -> Result<PathBuf, String> {
    if let Some(dir) = env::var_os("MLX_DIR") {
        let dir = PathBuf::from(dir);
        check(&dir).map_err(|e| format!("MLX_DIR={}: {e}", dir.display()))?;
        return Ok(dir);
    }
    let package = package()?;
    if let Some(dir) = importable(package) {
        return Ok(dir);
    }
    download(package)
}

fn package() -> Result<&'static str, String> {
    let os = env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    let feature = |name: &str| env::var_os(format!("CARGO_FEATURE_{name}")).is_some();
    match (os.as_str(), feature("CUDA12"), feature("CUDA13")) {
        ("macos", false, false) => Ok("mlx-metal"),
        ("linux", false, false) => Ok("mlx-cpu"),
        ("linux", true, false) => Ok("mlx-cuda-12"),
        ("linux", false, true) => Ok("mlx-cuda-13"),
        (_, true, true) => Err("features cuda12 and cuda13 exclude each other: choose one".into()),
        _ => Err(format!("no MLX build for target OS '{os}' with these features; set MLX_DIR")),
    }
}

/// Checks that `dir` holds the pinned version of MLX.
fn check(dir: &Path) -> Result<(), String> {
    let header = dir.join("include/mlx/version.h");
    let text = fs::read_to_string(&header).map_err(|e| format!("cannot read {}: {e}", header.display()))?;
    let number = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(&format!("#define MLX_VERSION_{name} ")))
            .map(|value| value.trim().to_owned())
            .unwrap_or_default()
    };
    let found = format!("{}.{}.{}", number("MAJOR"), number("MINOR"), number("PATCH"));
    if found != VERSION {
        return Err(format!("MLX is {found}, this version of russet-mlx needs exactly {VERSION}"));
    }
    let name = if cfg!(target_os = "macos") { "libmlx.dylib" } else { "libmlx.so" };
    if !dir.join("lib").join(name).exists() {
        return Err(format!("no lib/{name} there"));
    }
    Ok(())
}

/// An installed `mlx` of the pinned version and the wanted kind, if `python3` has one.
fn importable(package: &str) -> Option<PathBuf> {
    let script = format!(
        "import importlib.metadata as m, importlib.util as u\n\
         assert m.version('{package}') == '{VERSION}'\n\
         print(list(u.find_spec('mlx').submodule_search_locations)[0])"
    );
    let output = Command::new("python3").args(["-c", &script]).output().ok()?;
    let dir = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    (output.status.success() && check(&dir).is_ok()).then_some(dir)
}

fn download(package: &str) -> Result<PathBuf, String> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let arch = if arch == "aarch64" && package == "mlx-metal" { "arm64" } else { &arch };
    let wheels: Vec<&Wheel> =
        WHEELS.iter().filter(|w| w.0 == package && w.1.ends_with(&format!("_{arch}"))).collect();
    let first = wheels.first().ok_or_else(|| format!("{package} has no wheel for {arch}; set MLX_DIR"))?;

    // The key names the wheel set, so that several builds of MLX live side by side.
    let root = cache_dir()?.join(format!("{package}-{VERSION}-{}", &first.2[..12]));
    let dir = root.join("mlx");
    if dir.exists() {
        check(&dir)?;
        return Ok(dir);
    }
    let parent = root.parent().ok_or("cache folder has no parent")?;
    let staging = parent.join(format!(".staging-{}", std::process::id()));
    let _ = fs::remove_dir_all(&staging);
    fs::create_dir_all(&staging).map_err(|e| format!("cannot create {}: {e}", staging.display()))?;
    let result = fetch_wheel(package, &wheels, &staging).and_then(|()| {
        check(&staging.join("tree/mlx"))?;
        match fs::rename(staging.join("tree"), &root) {
            Ok(()) => Ok(()),
            // Another build finished first: its tree came from the same hashed wheel.
            Err(_) if dir.exists() => Ok(()),
            Err(e) => Err(format!("cannot move MLX to {}: {e}", root.display())),
        }
    });
    let _ = fs::remove_dir_all(&staging);
    result.map(|()| dir)
}

/// Downloads the wheel into `staging` and unpacks it to `staging/tree`.
fn fetch_wheel(package: &str, wheels: &[&Wheel], staging: &Path) -> Result<(), String> {
    let requirements = staging.join("requirements.txt");
    let hashes: String = wheels.iter().map(|w| format!(" --hash=sha256:{}", w.2)).collect();
    fs::write(&requirements, format!("{package}=={VERSION}{hashes}\n")).map_err(|e| e.to_string())?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]);
    // A host without the wheel's own device (a CUDA build on a machine without CUDA) is fine: the
    // wheel is only unpacked, never imported.
    pip.arg("--dest").arg(staging).arg("-r").arg(&requirements);
    run(&mut pip).map_err(|e| {
        format!(
            "cannot download {package} {VERSION}: {e}\nInstall Python 3 with pip, or set MLX_DIR to an \
             unpacked `mlx` folder of {package} {VERSION}."
        )
    })?;
    let wheel = fs::read_dir(staging)
        .map_err(|e| e.to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .ok_or("pip downloaded no wheel")?;
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(staging.join("tree")))
        .map_err(|e| format!("cannot unpack {}: {e}", wheel.display()))
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("cannot run python3: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

/// One cache for every profile and checkout of this user.
fn cache_dir() -> Result<PathBuf, String> {
    if let Some(dir) = env::var_os("RUSSET_MLX_CACHE") {
        return Ok(PathBuf::from(dir));
    }
    if let Some(dir) = env::var_os("XDG_CACHE_HOME").filter(|d| !d.is_empty()) {
        return Ok(PathBuf::from(dir).join("russet"));
    }
    let home = env::var_os("HOME").ok_or("HOME is not set: set RUSSET_MLX_CACHE or MLX_DIR")?;
    let cache = if cfg!(target_os = "macos") { "Library/Caches/russet" } else { ".cache/russet" };
    Ok(PathBuf::from(home).join(cache))
}
