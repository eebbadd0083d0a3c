//! Headers of a kernel of the lab, for modules that are built for it: fetched when a module is
//! requested, and not before.
//!
//! They are of exactly the kernel's build: the version is the one that its image names, and all
//! three packages (`linux-headers-RELEASE`, the `-common` one and `linux-kbuild-…`) are of that
//! version. With MODVERSIONS a module of another build may load, or not: symbol checksums decide.
//!
//! Like the other parts they are a directory of [`cache_dir`], `headers-RELEASE_VERSION`, about 90
//! MB of a download of 15. It may be moved: the packages' makefile names its other half by an
//! absolute path, which is replaced when they are unpacked. [`is_old`] determines whether their
//! kernel is gone, for [`prune`](crate::prune).
//!
//! Compiler and `make` are the machine's. Left out: kernels of other distributions, and kernels
//! whose build tools need a newer C library than this machine has.

use std::fs;
use std::path::{Path, PathBuf};

use super::apt::{Apt, Wanted};
use super::{Kernel, KernelBuild, cache_dir, find_program, headers_build_dir, headers_dir, names};
use crate::LabError;

/// Headers of one kernel, unpacked, and the compiler for them.
#[derive(Debug, Clone)]
pub(crate) struct Headers {
    build_dir: PathBuf,
}

impl Headers {
    /// Finds or fetches them; `notice` receives a line before and during any slow step.
    ///
    /// # Errors
    /// [`LabError::Package`]: the sources do not have this version any more, for example; with
    /// advice. [`LabError::Full`].
    pub(crate) fn get(build: &KernelBuild, notice: &dyn Fn(&str)) -> Result<Self, LabError> {
        let cache = cache_dir();
        let dir = headers_dir(&cache, build);
        if !dir.is_dir() {
            let apt = Apt::open(&cache, notice)?;
            // Another start may have fetched them while this one waited for the lock.
            if !dir.is_dir() {
                apt.fetch(&[Wanted::Headers(build)])?;
            }
        }
        Ok(Self {
            build_dir: headers_build_dir(&dir, &build.release),
        })
    }

    /// Returns the directory for `make -C` of a module.
    pub(crate) fn build_dir(&self) -> &Path {
        &self.build_dir
    }

    /// Returns the tools for a module's build that the machine lacks, out of `make` and the
    /// compiler that the kernel was built by. In Debian the packages have the programs' names.
    ///
    /// # Errors
    /// Headers that cannot be read.
    pub(crate) fn missing_tools(&self) -> Result<Vec<String>, LabError> {
        self.tools_missing(|tool| find_program(tool).is_some())
    }

    fn tools_missing(&self, has: impl Fn(&str) -> bool) -> Result<Vec<String>, LabError> {
        let config = self.build_dir.join("include/config/auto.conf");
        let config = fs::read_to_string(&config).map_err(LabError::host("read", &config))?;
        // The packages' makefile needs a compiler of this name too, whatever `gcc` is.
        let compiler = gcc_major(&config).map(|major| format!("gcc-{major}"));
        let tools = ["make".to_owned()].into_iter().chain(compiler);
        Ok(tools.filter(|tool| !has(tool)).collect())
    }
}

/// Returns the major version of the GCC that built the kernel of this configuration; `None` for
/// another compiler.
fn gcc_major(config: &str) -> Option<u32> {
    let version = config
        .lines()
        .find_map(|line| line.strip_prefix("CONFIG_GCC_VERSION="))?;
    let major = version.trim().parse::<u32>().ok()? / 10_000;
    (major > 0).then_some(major)
}

/// Returns whether a folder of the cache has headers of a kernel that is gone.
pub(crate) fn is_old(cache: &Path, name: &str) -> bool {
    let is_current = |kernel: String| {
        let kernel = kernel.starts_with("linux-").then(|| cache.join(kernel));
        let build = kernel.and_then(Kernel::at).map(|kernel| kernel.build());
        // The build of an unreadable kernel is unknown.
        build.is_some_and(|build| {
            build.map_or(true, |build| headers_dir(cache, &build).ends_with(name))
        })
    };
    name.starts_with("headers-") && !names(cache).into_iter().any(is_current)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build() -> KernelBuild {
        KernelBuild {
            release: "6.12.95+deb12-cloud-amd64".into(),
            version: "6.12.95-1~bpo12+1".into(),
        }
    }

    /// Returns unpacked headers with this configuration.
    fn unpacked(config: &str) -> (tempfile::TempDir, Headers) {
        let dir = tempfile::tempdir().expect("a directory");
        let build_dir = headers_build_dir(dir.path(), &build().release);
        fs::create_dir_all(build_dir.join("include/config")).expect("a directory");
        fs::write(build_dir.join("include/config/auto.conf"), config).expect("a file");
        (dir, Headers { build_dir })
    }

    #[test]
    fn the_kernels_own_compiler_is_wanted() {
        let (_dir, headers) = unpacked("CONFIG_X86=y\nCONFIG_GCC_VERSION=120200\n");
        let missing = |has: &[&str]| {
            let missing = headers.tools_missing(|tool| has.contains(&tool));
            missing.expect("they can be read")
        };
        assert_eq!(missing(&["make", "gcc-12"]), [""; 0]);
        assert_eq!(missing(&["make", "gcc", "gcc-14"]), ["gcc-12"]);
        assert_eq!(missing(&[]), ["make", "gcc-12"]);
        let (_dir, other) = unpacked("CONFIG_GCC_VERSION=0\n");
        let missing = other.tools_missing(|tool| tool == "make");
        assert_eq!(missing.expect("they can be read"), [""; 0]);
    }

    #[test]
    fn headers_without_their_kernel_are_old() {
        let dir = tempfile::tempdir().expect("a directory");
        let cache = dir.path();
        let boot = cache.join("linux-6.12/boot");
        fs::create_dir_all(&boot).expect("a directory");
        let KernelBuild { release, version } = build();
        let mut image = vec![0; 0x300];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e] = 0x80;
        let text = format!("{release} (x@y) #1 SMP Debian {version} (2026-07-05)\0");
        image.splice(0x280.., text.bytes());
        fs::write(boot.join(format!("vmlinuz-{release}")), image).expect("a file");
        let current = headers_dir(cache, &build());
        let current = current.file_name().expect("one").to_str().expect("one");
        assert!(!is_old(cache, current));
        assert!(is_old(cache, &current.replace("-1~", "-2~")));
        assert!(is_old(cache, "headers-6.1.0-56-cloud-amd64_6.1.192-2"));
        for other in ["linux-6.12", "qemu-10.0", "programs-0123456789abcdef"] {
            assert!(!is_old(cache, other), "{other}");
        }
        // An unreadable kernel may be the one of these headers.
        fs::create_dir_all(cache.join("linux-own/boot")).expect("a directory");
        fs::write(cache.join("linux-own/boot/vmlinuz-1"), "").expect("a file");
        assert!(!is_old(cache, "headers-1_2"));
    }
}
