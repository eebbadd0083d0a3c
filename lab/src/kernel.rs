//! Contents of a packaged Linux kernel: the ELF inside a bzImage, and the load order of its
//! modules.
//!
//! Sources: the kernel's `Documentation/arch/x86/boot.rst` (setup header: `setup_sects` at 0x1f1,
//! `HdrS` at 0x202, `kernel_version` at 0x20e, `payload_offset` and `payload_length` at 0x248 and
//! 0x24c, protocol ≥ 2.08);
//! `.modinfo` of a module carries `depends=a,b`. Left out: `modules.dep`, which only exists after
//! an installation.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use crate::LabError;

mod lz4;

/// Returns the uncompressed kernel (ELF) inside a bzImage.
///
/// # Errors
/// [`LabError::Config`] if the image is no bzImage or its compression is unknown; the
/// decompressor's failure otherwise.
pub fn extract_vmlinux(image: &[u8]) -> Result<Vec<u8>, LabError> {
    let payload = bzimage_payload(image)
        .ok_or_else(|| LabError::Config("the kernel is no bzImage with a payload".into()))?;
    // The kernel appends the unpacked size to the compressed data.
    let compressed = &payload[..payload.len() - 4];
    let data = match compressed {
        [0x02, 0x21, 0x4c, 0x18, blocks @ ..] => lz4::unpack_legacy(blocks)
            .ok_or_else(|| LabError::Config("the kernel's LZ4 data is damaged".into()))?,
        [0xfd, b'7', b'z', b'X', b'Z', ..] => {
            filter("xz", &["-dc", "--single-stream"], compressed)?
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => filter("zstd", &["-dcq"], compressed)?,
        [0x1f, 0x8b, ..] => filter("gzip", &["-dcq"], compressed)?,
        _ => {
            return Err(LabError::Config(
                "the kernel's compression is unknown".into(),
            ));
        }
    };
    if !data.starts_with(b"\x7fELF") {
        return Err(LabError::Config(
            "the kernel's payload is no ELF file".into(),
        ));
    }
    Ok(data)
}

/// Returns the version of the Debian package that a bzImage was built as (`6.1.192-2`), by the
/// version string of its setup header; `None` if there is none, or it is another distribution's.
///
/// # Errors
/// A file that cannot be read.
pub fn package_version(vmlinuz: &Path) -> Result<Option<String>, LabError> {
    // The pointer to the string is a 16-bit offset.
    const HEAD: u64 = 0x200 + 0x10000 + 0x200;
    let mut head = Vec::new();
    File::open(vmlinuz)
        .and_then(|file| file.take(HEAD).read_to_end(&mut head))
        .map_err(LabError::host("read", vmlinuz))?;
    Ok(version_string(&head).and_then(debian_version))
}

/// Returns the string that `kernel_version` of the setup header points to, past the boot sector.
fn version_string(image: &[u8]) -> Option<&str> {
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let pointer: [u8; 2] = image.get(0x20e..0x210)?.try_into().ok()?;
    let start = match u16::from_le_bytes(pointer) {
        0 => return None,
        pointer => 0x200 + usize::from(pointer),
    };
    let text = image.get(start..)?.split(|byte| *byte == 0).next()?;
    str::from_utf8(text).ok()
}

/// Parses `6.1.0-56-cloud-amd64 (debian-kernel@…) #1 SMP Debian 6.1.192-2 (2026-11-16)` →
/// `6.1.192-2`.
fn debian_version(text: &str) -> Option<String> {
    let mut words = text.split_whitespace().skip_while(|word| *word != "Debian");
    words.nth(1).map(str::to_owned)
}

fn bzimage_payload(image: &[u8]) -> Option<&[u8]> {
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let word = |at: usize| {
        let bytes: [u8; 4] = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    // 0 sectors means 4, for historical reasons; one more is the boot sector.
    let sectors = match *image.get(0x1f1)? {
        0 => 4,
        n => usize::from(n),
    };
    let start = (sectors + 1).checked_mul(512)?.checked_add(word(0x248)?)?;
    let end = start.checked_add(word(0x24c)?)?;
    image.get(start..end).filter(|payload| payload.len() > 16)
}

/// Runs `tool` over `input`.
fn filter(tool: &'static str, args: &[&str], input: &[u8]) -> Result<Vec<u8>, LabError> {
    let failed = LabError::host("run", tool);
    let mut child = Command::new(tool)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(&failed)?;
    let mut stdin = child.stdin.take().expect("stdin was piped");
    let out = thread::scope(|scope| {
        // The tool may stop reading early; its exit status shows the error.
        scope.spawn(move || stdin.write_all(input));
        child.wait_with_output()
    })
    .map_err(&failed)?;
    if !out.status.success() {
        return Err(LabError::Config(format!(
            "{tool} could not unpack its input: {}",
            out.status
        )));
    }
    Ok(out.stdout)
}

/// The modules of one kernel, by name.
#[derive(Debug)]
pub struct Modules {
    paths: HashMap<String, PathBuf>,
}

/// One module, ready for `insmod`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Name with underscores, as in `/proc/modules`.
    pub name: String,
    /// The uncompressed file.
    pub data: Vec<u8>,
}

impl Modules {
    /// Lists the modules below `dir` (`/lib/modules/RELEASE`).
    ///
    /// # Errors
    /// A directory that cannot be read.
    pub fn below(dir: &Path) -> Result<Self, LabError> {
        let mut paths = HashMap::new();
        let mut pending = vec![dir.to_path_buf()];
        while let Some(dir) = pending.pop() {
            for entry in fs::read_dir(&dir)
                .map_err(LabError::host("read", &dir))?
                .flatten()
            {
                let path = entry.path();
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    pending.push(path);
                } else if let Some(name) = path.file_name().and_then(module_name) {
                    paths.insert(name, path);
                }
            }
        }
        Ok(Self { paths })
    }

    /// Adds the module in `file`, which is not from the kernel's package. Returns its name.
    ///
    /// # Errors
    /// [`LabError::Config`]: the file's name is not that of a module.
    pub fn add(&mut self, file: &Path) -> Result<String, LabError> {
        let name = file.file_name().and_then(module_name);
        let name = name.ok_or_else(|| {
            LabError::Config(format!("{} is not a kernel module's file", file.display()))
        })?;
        self.paths.insert(name.clone(), file.to_path_buf());
        Ok(name)
    }

    /// Returns `wanted` and all their dependencies, each after its dependencies. Names built into
    /// the kernel (no such file) are left out; see [`Modules::has`].
    ///
    /// # Errors
    /// A module that cannot be read or unpacked.
    pub fn in_load_order(&self, wanted: &[&str]) -> Result<Vec<Module>, LabError> {
        let mut order = Vec::new();
        for name in wanted {
            self.visit(&name.replace('-', "_"), &mut Vec::new(), &mut order)?;
        }
        Ok(order)
    }

    /// Returns whether the kernel has this module as a file.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.paths.contains_key(&name.replace('-', "_"))
    }

    fn visit(
        &self,
        name: &str,
        above: &mut Vec<String>,
        order: &mut Vec<Module>,
    ) -> Result<(), LabError> {
        let Some(path) = self.paths.get(name) else {
            return Ok(());
        };
        if order.iter().any(|module| module.name == name) || above.iter().any(|n| n == name) {
            return Ok(());
        }
        let raw = fs::read(path).map_err(LabError::host("read", path))?;
        let data = match path.extension().and_then(|e| e.to_str()) {
            Some("xz") => filter("xz", &["-dc"], &raw)?,
            Some("zst") => filter("zstd", &["-dcq"], &raw)?,
            Some("gz") => filter("gzip", &["-dc"], &raw)?,
            _ => raw,
        };
        above.push(name.to_owned());
        for dependency in depends(&data) {
            self.visit(&dependency, above, order)?;
        }
        above.pop();
        order.push(Module {
            name: name.to_owned(),
            data,
        });
        Ok(())
    }
}

/// Returns a module's name: `virtio-rng.ko.xz` → `virtio_rng`.
fn module_name(file: &std::ffi::OsStr) -> Option<String> {
    let (stem, rest) = file.to_str()?.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| stem.replace('-', "_"))
}

/// Returns the names after `depends=` in a module's `.modinfo`.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = module[at + KEY.len()..]
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    let text = String::from_utf8_lossy(value);
    text.split(',')
        .filter(|n| !n.is_empty())
        .map(|n| n.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests;
