//! A module of the workspace for the guest's kernel: built by kbuild, out of the kernel's tree,
//! against headers of exactly that kernel.
//!
//! [`build()`] hashes the sources first. The result is a folder of the cache, `module-HASH`, for
//! each build of a kernel and each state of the sources, so that the second start of a lab compiles
//! nothing and needs no headers. The folder has the module without debugging information, for the
//! guest's image, and `NAME.ko.debug` with it, for `addr2line` and the like. Folders that were used
//! longest ago are removed after a build ([`prune`]).
//!
//! A copy of the sources is built, so nothing is left beside them; messages name the sources.
//! Left out: signatures, BTF, modules of several files of which one kernel module needs another.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::LabError;
use crate::build::stripped;
use crate::packages::{Headers, Kernel, KernelBuild, cache_dir, full_or, unique, workspace_dir};
use crate::prune;

/// Largest number of lines of an error: the compiler's first message says more than `make`'s last.
const LINES: usize = 40;

/// Options of each build. modpost would need `pahole` for BTF if the headers have a vmlinux.
const OPTIONS: [&str; 1] = ["CONFIG_DEBUG_INFO_BTF_MODULES="];

/// Environment variables that make and the compiler get: any other would be a variable of the
/// makefiles, and is not part of the key.
const ENVIRONMENT: [&str; 3] = ["PATH", "HOME", "TMPDIR"];

/// Returns the directory of the sources of this workspace's driver for virtio-iommu.
#[must_use]
pub fn iommu_module() -> PathBuf {
    workspace_dir().join("guest/iommu-module")
}

/// Returns the directory of the sources of the module that runs one list of cases against any
/// virtio-iommu.
#[must_use]
pub fn iommu_cases() -> PathBuf {
    workspace_dir().join("guest/iommu-cases")
}

/// Sources of a module.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModuleSources {
    /// A directory with a `Makefile` or `Kbuild` for one module.
    pub dir: PathBuf,
    /// Variables for make, `NAME=VALUE`.
    pub variables: Vec<String>,
}

impl From<PathBuf> for ModuleSources {
    /// Creates sources without variables.
    fn from(dir: PathBuf) -> Self {
        let variables = Vec::new();
        Self { dir, variables }
    }
}

/// A kernel module, built for a guest's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestModule {
    path: PathBuf,
}

impl GuestModule {
    /// Returns the file for `insmod`: `NAME.ko`, without debugging information.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the module built in `dir`, if that is complete.
    fn in_dir(dir: &Path) -> Option<Self> {
        let path = only_module(dir).ok()?;
        Some(Self { path })
    }
}

/// Builds a module, unless it was built for this kernel before; `notice` receives a line before and
/// during any slow step, and the compiler's warnings.
///
/// # Errors
/// - [`LabError::Config`]: the directory has no module, or several; a variable is malformed; or
///   `make` does not accept the cache's path.
/// - [`LabError::Package`]: headers that are not available.
/// - [`LabError::Build`]: there is no compiler for the kernel, with the package to install; or the
///   module does not compile or link, with the first messages.
/// - [`LabError::Host`], [`LabError::Full`].
pub fn build(
    sources: &ModuleSources,
    kernel: &Kernel,
    notice: &dyn Fn(&str),
) -> Result<GuestModule, LabError> {
    check(sources)?;
    let files = source_files(&sources.dir)?;
    let build = kernel.build()?;
    let cache = cache_dir();
    let dir = cache.join(format!(
        "module-{:016x}",
        key(&build, &sources.variables, &files)
    ));
    if let Some(module) = GuestModule::in_dir(&dir) {
        prune::note_use(&dir);
        return Ok(module);
    }
    let headers = Headers::get(&build, notice)?;
    let missing = headers.missing_tools()?;
    if !missing.is_empty() {
        return Err(failed(&sources.dir, &build, &lacking(&missing)));
    }
    notice(&format!(
        "building {} for Linux {}",
        sources.dir.display(),
        build.release
    ));
    let scratch = dir.with_extension(unique());
    let made = make(&headers, sources, &files, &scratch, &build, notice)
        .and_then(|()| finish(&scratch, &sources.dir, &dir))
        // The free space must be read before the folder is removed.
        .map_err(|error| full_or(&cache, error));
    // Best effort: leftovers only waste space, until the cache is pruned.
    let _ = fs::remove_dir_all(&scratch);
    made?;
    prune::keep_few_modules(&cache, &dir);
    GuestModule::in_dir(&dir)
        .ok_or_else(|| LabError::Config(format!("{} is damaged", dir.display())))
}

/// Checks a user's configuration before anything is started.
pub(crate) fn check(sources: &ModuleSources) -> Result<(), LabError> {
    let has = |name: &str| sources.dir.join(name).is_file();
    if !has("Makefile") && !has("Kbuild") {
        return Err(LabError::Config(format!(
            "{} has no kernel module's sources: there is neither a Makefile nor a Kbuild",
            sources.dir.display()
        )));
    }
    // Neither an option of make nor a target.
    match sources.variables.iter().find(|it| !is_variable(it)) {
        Some(other) => Err(LabError::Config(format!(
            "{other:?} is no variable for make: it has to be NAME=VALUE"
        ))),
        None => Ok(()),
    }
}

fn is_variable(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split_once('=')
        .is_some_and(|(name, _)| !name.is_empty() && name.chars().all(is_part))
}

/// A file of the sources: its path below them, and its content.
type Source = (PathBuf, Vec<u8>);

/// Returns all files below `dir`, sorted, except hidden ones and those that kbuild leaves.
fn source_files(dir: &Path) -> Result<Vec<Source>, LabError> {
    let mut found = Vec::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(below) = pending.pop() {
        let at = dir.join(&below);
        for entry in fs::read_dir(&at)
            .map_err(LabError::host("read", &at))?
            .flatten()
        {
            let (path, relative) = (entry.path(), below.join(entry.file_name()));
            if is_product(&entry.file_name().to_string_lossy()) {
                continue;
            }
            // Links to directories are not followed: they may be circular.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                pending.push(relative);
            } else if path.is_file() {
                let data = fs::read(&path).map_err(LabError::host("read", &path))?;
                found.push((relative, data));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns whether a file of this name is hidden, or made by kbuild.
fn is_product(name: &str) -> bool {
    const ENDS: [&str; 6] = [".o", ".ko", ".mod", ".mod.c", ".a", ".symvers"];
    name.starts_with('.') || name == "modules.order" || ENDS.iter().any(|end| name.ends_with(end))
}

/// Returns a hash of all inputs of a module, except the compiler.
fn key(build: &KernelBuild, variables: &[String], files: &[Source]) -> u64 {
    let mut hash = DefaultHasher::new();
    (OPTIONS, build, variables, files).hash(&mut hash);
    hash.finish()
}

/// Builds a copy of the sources in `scratch`.
fn make(
    headers: &Headers,
    sources: &ModuleSources,
    files: &[Source],
    scratch: &Path,
    build: &KernelBuild,
    notice: &dyn Fn(&str),
) -> Result<(), LabError> {
    // Kbuild refuses spaces and colons in its paths; the others are special to make.
    let text = scratch.to_string_lossy();
    if text.contains([':', ' ', '\t', '$', '#']) {
        return Err(LabError::Config(format!(
            "kernel modules cannot be built below {text}: make takes no spaces, colons, `$` and \
             `#` there \
             (EXITLESS_LAB_DIR names another directory)"
        )));
    }
    for (relative, data) in files {
        let path = scratch.join(relative);
        let parent = path.parent().unwrap_or(scratch);
        fs::create_dir_all(parent).map_err(LabError::host("create", parent))?;
        fs::write(&path, data).map_err(LabError::host("write", &path))?;
    }
    let mut command = Command::new("make");
    command
        .arg("-s")
        .arg("-C")
        .arg(headers.build_dir())
        .arg(format!("M={}", scratch.display()))
        .args(OPTIONS)
        .args(&sources.variables)
        .arg("modules")
        .env_clear()
        .envs(
            ENVIRONMENT
                .iter()
                .filter_map(|name| Some((name, env::var_os(name)?))),
        )
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    let out = command.output().map_err(LabError::host("run", "make"))?;
    let messages = messages(&out, scratch, &sources.dir);
    if out.status.success() {
        messages.iter().for_each(|line| notice(line));
        return Ok(());
    }
    // The first line is the failure, the others are the reasons.
    Err(failed(
        &sources.dir,
        build,
        &format!("make: {}\n{}", out.status, messages.join("\n")),
    ))
}

fn failed(sources: &Path, build: &KernelBuild, reason: &str) -> LabError {
    LabError::Build {
        what: format!("module {} (Linux {})", sources.display(), build.release),
        reason: reason.into(),
    }
}

/// Returns the advice for missing tools, whose packages have their names.
fn lacking(tools: &[String]) -> String {
    format!(
        "this machine has no `{}`; `apt-get install {}` installs it",
        tools.join("`, `"),
        tools.join(" ")
    )
}

/// Returns the compiler's first lines, or make's if the compiler printed none, with the sources'
/// paths in place of the copies' paths.
fn messages(out: &Output, scratch: &Path, sources: &Path) -> Vec<String> {
    let all = [&out.stderr, &out.stdout].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let all = all.concat();
    let of_make = |line: &&str| line.starts_with("make:") || line.starts_with("make[");
    let lines = all.lines().filter(|line| !line.trim().is_empty());
    let (made, compiled): (Vec<&str>, Vec<&str>) = lines.partition(of_make);
    let told = if compiled.is_empty() { made } else { compiled };
    let copy = scratch.to_string_lossy();
    let name = sources.to_string_lossy();
    let told = told.into_iter().take(LINES);
    told.map(|line| line.replace(&*copy, &name)).collect()
}

/// Moves the module that was built in `scratch` into `dir`.
fn finish(scratch: &Path, sources: &Path, dir: &Path) -> Result<(), LabError> {
    let built = only_module(scratch).map_err(|count| {
        LabError::Config(format!(
            "{} makes {count} kernel modules, and not one",
            sources.display()
        ))
    })?;
    let name = built.file_name().unwrap_or_default().to_owned();
    let done = scratch.with_extension(unique());
    fs::create_dir_all(&done).map_err(LabError::host("create", &done))?;
    let module = done.join(&name);
    let write =
        |path: &Path, data: &[u8]| fs::write(path, data).map_err(LabError::host("write", path));
    let whole = fs::read(&built).map_err(LabError::host("read", &built))?;
    write(&module.with_extension("ko.debug"), &whole)?;
    write(&module, &stripped(&built)?)?;
    prune::note_use(&done);
    let renamed = fs::rename(&done, dir);
    if renamed.is_err() {
        let _ = fs::remove_dir_all(&done);
    }
    // Another start may have built the same module.
    match GuestModule::in_dir(dir) {
        Some(_) => Ok(()),
        None => renamed.map_err(LabError::host("rename to", dir)),
    }
}

/// Returns the one module in `dir`; the error is their number.
fn only_module(dir: &Path) -> Result<PathBuf, usize> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut modules: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "ko"))
        .collect();
    match (modules.pop(), modules.len()) {
        (Some(module), 0) => Ok(module),
        (None, _) => Err(0),
        (Some(_), others) => Err(others + 1),
    }
}

#[cfg(test)]
mod tests;
