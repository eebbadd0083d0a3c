//! The Cargo workspaces of this repository.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::graph::Graph;

/// A crate of the workspace.
#[derive(Clone, Debug, Default)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// The top-level folder that contains it: `libs`, `virt`, …
    pub layer: String,
    /// Folder of its manifest.
    pub folder: PathBuf,
    /// Root files of its library and programs.
    pub roots: Vec<PathBuf>,
    /// Those of them that `cargo test` does not test.
    pub untested: Vec<PathBuf>,
    /// Root files of all its targets: tests, benchmarks and build scripts too.
    pub targets: Vec<PathBuf>,
    /// Names of its targets in `tests/`.
    pub tests: BTreeSet<String>,
    /// Crates from which it is built, of this repository and others.
    pub needs: BTreeSet<String>,
    /// Optional ones among these, which a feature enables.
    pub may_need: BTreeSet<String>,
    /// Crates that its tests need.
    pub tested_with: BTreeSet<String>,
    /// Its features, and what each enables, as written in the manifest.
    pub features: BTreeMap<String, Vec<String>>,
    /// The features that it enables in crates from which it is built, `default` included.
    pub turns_on: BTreeMap<String, BTreeSet<String>>,
}

impl Package {
    /// Returns the crates of `may_need` that these features enable.
    #[must_use]
    pub fn brought_in<'a>(
        &'a self,
        features: impl IntoIterator<Item = &'a str>,
    ) -> BTreeSet<&'a str> {
        let mut open: Vec<&str> = features.into_iter().collect();
        let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
        while let Some(feature) = open.pop() {
            if !seen.insert(feature) {
                continue;
            }
            for turned_on in self.features.get(feature).into_iter().flatten() {
                // `dep:crate`, `crate/feature`, `crate?/feature`, or another feature.
                match (turned_on.strip_prefix("dep:"), turned_on.split_once('/')) {
                    (Some(name), _) => _ = found.insert(name),
                    (None, Some((name, _))) if name.ends_with('?') => {}
                    (None, Some((name, _))) => _ = found.insert(name),
                    (None, None) => open.push(turned_on),
                }
            }
        }
        found.retain(|name| self.may_need.contains(*name));
        found
    }
}

/// All crates, and their dependencies.
#[derive(Debug)]
pub struct Workspace {
    /// Crates of this repository, by name.
    pub packages: BTreeMap<String, Package>,
    /// Dependencies of other crates, by name. Versions are not distinguished.
    others: BTreeMap<String, BTreeSet<String>>,
}

/// Folders of the workspaces' manifests: the main workspace, and the one of code that runs without
/// an operating system.
const WORKSPACES: [&str; 2] = [".", "bin/exitless-hv"];

/// Returns the repository's root.
///
/// # Errors
/// It does not exist.
pub fn root() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().context("the repository")
}

impl Workspace {
    /// Reads all workspaces of the repository as one: their manifests by `cargo metadata`, and each
    /// `Cargo.lock` for other crates. Nothing is downloaded.
    ///
    /// # Errors
    /// Cargo fails, or its answer has another form than documented.
    pub fn read() -> Result<Self> {
        let root = root()?;
        let (mut all, mut others) = (BTreeMap::new(), BTreeMap::new());
        for folder in WORKSPACES.map(|folder| root.join(folder)) {
            all.extend(packages(&metadata(&folder)?, &root)?);
            let lock = fs::read_to_string(folder.join("Cargo.lock")).context("Cargo.lock")?;
            others.extend(locked(&lock));
        }
        Ok(Self {
            packages: all,
            others,
        })
    }

    /// Returns the path of dependencies from a crate of this repository, or from its tests, to a
    /// package of this name.
    pub fn way(&self, from: &str, to: &str) -> Option<Vec<String>> {
        let mut graph = Graph::default();
        for (name, needs) in &self.others {
            let ours = self.packages.get(name).map(|package| {
                let tests = package.tested_with.iter().filter(|_| name == from);
                package.needs.iter().chain(&package.may_need).chain(tests)
            });
            match ours {
                Some(needs) => needs.for_each(|need| graph.add(name, need)),
                None => needs.iter().for_each(|need| graph.add(name, need)),
            }
        }
        graph.way(from, to)
    }
}

/// Returns the names of all packages from which `package` of the main workspace is built, itself
/// included, with its default features. Dependencies of tests and build scripts are not included.
///
/// # Errors
/// Cargo fails.
pub fn built_from(package: &str) -> Result<BTreeSet<String>> {
    let edges = ["--edges", "normal", "--prefix", "none", "--format", "{p}"];
    let tree = [&["tree", "--offline", "--package", package][..], &edges].concat();
    let said = cargo(&root()?, &tree)?;
    let said = String::from_utf8(said).context("cargo tree")?;
    let names = said.lines().filter_map(|line| line.split(' ').next());
    Ok(names.map(str::to_owned).collect())
}

/// Returns Cargo's metadata of the workspace in `folder`.
fn metadata(folder: &Path) -> Result<Value> {
    let version = ["--format-version", "1"];
    let asked = [&["metadata", "--no-deps", "--offline"][..], &version].concat();
    Ok(serde_json::from_slice(&cargo(folder, &asked)?)?)
}

/// Runs cargo in `folder` and returns its standard output.
fn cargo(folder: &Path, args: &[&str]) -> Result<Vec<u8>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let asked = Command::new(cargo).args(args).current_dir(folder).output();
    let asked = asked.with_context(|| format!("cargo {args:?}"))?;
    let said = String::from_utf8_lossy(&asked.stderr);
    ensure!(asked.status.success(), "cargo {args:?}: {said}");
    Ok(asked.stdout)
}

fn packages(metadata: &Value, root: &Path) -> Result<BTreeMap<String, Package>> {
    let mut packages = BTreeMap::new();
    for package in list(&metadata["packages"])? {
        let name = text(&package["name"])?.to_owned();
        let manifest = Path::new(text(&package["manifest_path"])?).strip_prefix(root)?;
        let layer = manifest.iter().next().context("a crate in a folder")?;
        let [mut roots, mut untested, mut targets] = [const { Vec::new() }; 3];
        let mut tests = BTreeSet::new();
        for target in list(&package["targets"])? {
            let kinds = list(&target["kind"])?;
            let root: PathBuf = text(&target["src_path"])?.into();
            targets.push(root.clone());
            if kinds.iter().any(|kind| kind == "test") {
                tests.insert(text(&target["name"])?.to_owned());
            }
            if kinds.iter().any(|kind| kind == "lib" || kind == "bin") {
                if target["test"] == false {
                    untested.push(root.clone());
                }
                roots.push(root);
            }
        }
        let [mut needs, mut may_need, mut tested_with] = [const { BTreeSet::new() }; 3];
        let mut turns_on: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for dependency in list(&package["dependencies"])? {
            let name = text(&dependency["name"])?.to_owned();
            if dependency["kind"] != "dev" {
                let on = turns_on.entry(name.clone()).or_default();
                on.extend(words(&dependency["features"])?);
                if dependency["uses_default_features"] == true {
                    on.insert("default".to_owned());
                }
            }
            match dependency["kind"].as_str() {
                Some("dev") => tested_with.insert(name),
                _ if dependency["optional"] == true => may_need.insert(name),
                _ => needs.insert(name),
            };
        }
        let features = package["features"].as_object();
        let features = features.context("features in Cargo's answer")?.iter();
        let features = features.map(|(name, on)| Ok((name.clone(), words(on)?)));
        let package = Package {
            name: name.clone(),
            layer: layer.to_string_lossy().into_owned(),
            folder: root.join(manifest).with_file_name(""),
            roots,
            untested,
            targets,
            tests,
            needs,
            may_need,
            tested_with,
            features: features.collect::<Result<_>>()?,
            turns_on,
        };
        packages.insert(name, package);
    }
    Ok(packages)
}

/// Returns names and dependencies from a `Cargo.lock`. Cargo writes it with one string a line.
fn locked(lock: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut packages = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let value = |line: &str| line.split('"').nth(1).map(str::to_owned);
        let name = package.lines().find(|line| line.starts_with("name = "));
        let Some(name) = name.and_then(value) else {
            continue;
        };
        let needs: &mut BTreeSet<String> = packages.entry(name).or_default();
        let lines = package
            .lines()
            .skip_while(|line| !line.starts_with("dependencies = ["));
        for need in lines
            .skip(1)
            .take_while(|line| *line != "]")
            .filter_map(value)
        {
            // A version follows the name if there are several of the package.
            needs.extend(need.split(' ').next().map(str::to_owned));
        }
    }
    packages
}

fn list(value: &Value) -> Result<&Vec<Value>> {
    value.as_array().context("a list in Cargo's answer")
}

fn words(value: &Value) -> Result<Vec<String>> {
    let words = list(value)?.iter();
    words.map(|word| text(word).map(str::to_owned)).collect()
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().context("a word in Cargo's answer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_bring_in_what_they_turn_on_however_it_is_written() {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        let package = Package {
            may_need: BTreeSet::from(["a", "b", "c", "d"].map(str::to_owned)),
            features: BTreeMap::from([
                ("by-name".to_owned(), words(&["dep:a"])),
                ("by-feature".to_owned(), words(&["b/x", "c?/x", "always/x"])),
                (
                    "by-both".to_owned(),
                    words(&["by-name", "by-feature", "by-both"]),
                ),
                ("d".to_owned(), words(&["dep:d"])),
                ("none".to_owned(), vec![]),
            ]),
            ..Package::default()
        };
        for (feature, brought_in) in [
            ("by-name", &["a"][..]),
            ("by-feature", &["b"]),
            ("by-both", &["a", "b"]),
            ("d", &["d"]),
            ("none", &[]),
            ("unknown", &[]),
        ] {
            let found = package.brought_in([feature]);
            assert_eq!(
                found.into_iter().collect::<Vec<_>>(),
                brought_in,
                "{feature}"
            );
        }
    }
}
