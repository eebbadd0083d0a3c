//! The workspaces of this repository as Cargo sees them.

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
    /// The folder of the repository that it lies in: `libs`, `virt`, …
    pub layer: String,
    /// Folder of its manifest.
    pub folder: PathBuf,
    /// Roots of its library and programs.
    pub roots: Vec<PathBuf>,
    /// Those of them that `cargo test` passes over.
    pub untested: Vec<PathBuf>,
    /// Roots of all its targets: tests, benchmarks and build scripts too.
    pub targets: Vec<PathBuf>,
    /// Names of its targets in `tests/`.
    pub tests: BTreeSet<String>,
    /// Crates it is built from, ours and others.
    pub needs: BTreeSet<String>,
    /// Those that only a feature brings in.
    pub may_need: BTreeSet<String>,
    /// Those it is tested with.
    pub tested_with: BTreeSet<String>,
    /// Its features, and what each turns on, as the manifest writes it.
    pub features: BTreeMap<String, Vec<String>>,
    /// The features that it turns on in crates that it is built from, `default` among them.
    pub turns_on: BTreeMap<String, BTreeSet<String>>,
}

impl Package {
    /// The crates that these features of it bring in, of those in `may_need`.
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

/// Crates, and what they are built from.
#[derive(Debug)]
pub struct Workspace {
    /// Ours, by name.
    pub packages: BTreeMap<String, Package>,
    /// Dependencies of other crates, by name; versions are not distinguished.
    others: BTreeMap<String, BTreeSet<String>>,
}

/// Folders of the manifests of workspaces: this crate's, and the one for the code that runs on no
/// operating system.
const WORKSPACES: [&str; 2] = [".", "bin/exitless-hv"];

/// The repository's root.
///
/// # Errors
/// It is not there.
pub fn root() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().context("the repository")
}

impl Workspace {
    /// All workspaces of the repository as one: what their manifests say, by Cargo, and each
    /// `Cargo.lock` for the rest. Nothing is fetched.
    ///
    /// # Errors
    /// Cargo does not answer, or otherwise than it says it does.
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

    /// The way from a crate of ours, or from its tests, to a package of this name.
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

/// Names of all packages that `package` of the main workspace is built from, itself among them,
/// with the features it has unless others are asked for; not what its tests and its builds need.
///
/// # Errors
/// Cargo does not answer.
pub fn built_from(package: &str) -> Result<BTreeSet<String>> {
    let edges = ["--edges", "normal", "--prefix", "none", "--format", "{p}"];
    let tree = [&["tree", "--offline", "--package", package][..], &edges].concat();
    let said = cargo(&root()?, &tree)?;
    let said = String::from_utf8(said).context("cargo tree")?;
    let names = said.lines().filter_map(|line| line.split(' ').next());
    Ok(names.map(str::to_owned).collect())
}

/// Cargo's description of the workspace in `folder`.
fn metadata(folder: &Path) -> Result<Value> {
    let version = ["--format-version", "1"];
    let asked = [&["metadata", "--no-deps", "--offline"][..], &version].concat();
    Ok(serde_json::from_slice(&cargo(folder, &asked)?)?)
}

/// Runs cargo in `folder`; its answer.
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

/// Names and dependencies of `Cargo.lock`, which is written by Cargo, one string a line.
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
            // A version follows where there are several.
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
