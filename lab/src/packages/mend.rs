//! Fix of a fault of QEMU in the lab's own copy: an interrupt that KVM injects is delivered once.
//!
//! `helper_vmrun` leaves the vector of an interrupt that it has delivered in `cs->exception_index`.
//! If an emulated processor is asked to leave its loop before the guest's next exit, it delivers
//! the interrupt again, with interrupts off (lab/README.md). A guest, or the emulated host itself,
//! may end in a triple fault as a result: the more often, the more of its processors send each
//! other interrupts, and the busier this machine is.
//!
//! The fix is a line behind the delivery, `cs->exception_index = -1`. In the compiled program it
//! replaces a line for the log of `-d in_asm`. A program in which that place is not found exactly
//! once is not changed, nor is one that is not the lab's. Found in Debian's QEMU 10.0.

use std::fs;
use std::path::Path;

use super::cache::unique;
use crate::LabError;

/// Bytes before the place, `..` for any byte: the vector's store (`mov %esi, INDEX(%rbx)`), two
/// more stores, a test whether there is a log, and the call.
const CALL: &str = "89 b3 .. .. .. .. c7 83 .. .. .. .. 00 00 00 00 48 c7 83 .. .. .. .. ff ff ff \
     ff \
                    f6 05 .. .. .. .. 02 0f 85 .. .. .. .. ba 01 00 00 00 48 89 df e8 .. .. .. ..";
/// Bytes at the place: `testb $2, …; je OUT`, and the log line, of which two bytes are replaced as
/// well.
const LOG: &str = "f6 05 .. .. .. .. 02 0f 84 .. .. .. ..";
/// Replacement: `movl $-1, INDEX(%rbx); jmp OUT`.
const CURE: &str = "c7 83 .. .. .. .. ff ff ff ff e9 .. .. .. ..";
/// Range of INDEX in the call and in the replacement.
const INDEX: std::ops::Range<usize> = 2..6;

/// Result of the fix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mended {
    /// The fault is fixed now, or was before.
    Yes,
    /// The place was not found: another build.
    No,
}

/// Fixes the program at `path`, which is replaced as a whole.
///
/// # Errors
/// It cannot be read, or written.
pub(super) fn mend(path: &Path) -> Result<Mended, LabError> {
    let mut program = fs::read(path).map_err(LabError::host("read", path))?;
    match mend_bytes(&mut program) {
        None => Ok(Mended::No),
        Some(false) => Ok(Mended::Yes),
        Some(true) => {
            // Another start may be running it.
            let new = path.with_extension(unique());
            let rights = fs::metadata(path).map_err(LabError::host("read", path))?;
            fs::write(&new, program).map_err(LabError::host("write", &new))?;
            fs::set_permissions(&new, rights.permissions())
                .and_then(|()| fs::rename(&new, path))
                .map_err(LabError::host("replace", path))?;
            Ok(Mended::Yes)
        }
    }
}

/// Returns whether the program was changed; `None` if the place is not there exactly once.
fn mend_bytes(program: &mut [u8]) -> Option<bool> {
    let (call, log, cure) = (pattern(CALL), pattern(LOG), pattern(CURE));
    if find_once(program, &[call.clone(), cure.clone()].concat()).is_some() {
        return Some(false);
    }
    let start = find_once(program, &[call.clone(), log.clone()].concat())?;
    let at = start + call.len();
    let after_log = at + log.len();
    let after_cure = at + cure.len();
    let distance: [u8; 4] = program[after_log - 4..after_log].try_into().ok()?;
    let out = i64::from(i32::from_le_bytes(distance)) + after_log as i64;
    let distance = i32::try_from(out - after_cure as i64).ok()?;
    let index = program[start..][INDEX].to_vec();
    let place = program.get_mut(at..after_cure)?;
    for (byte, new) in place.iter_mut().zip(&cure) {
        *byte = new.unwrap_or(0);
    }
    place[INDEX].copy_from_slice(&index);
    place[cure.len() - 4..].copy_from_slice(&distance.to_le_bytes());
    Some(true)
}

/// Parses the bytes of a pattern; `None` for any byte.
fn pattern(text: &str) -> Vec<Option<u8>> {
    text.split_whitespace()
        .map(|word| u8::from_str_radix(word, 16).ok())
        .collect()
}

/// Returns the position of the only match.
fn find_once(bytes: &[u8], pattern: &[Option<u8>]) -> Option<usize> {
    let first = pattern.first().copied().flatten()?;
    let fits = |window: &&[u8]| {
        let mut pairs = window.iter().zip(pattern);
        pairs.all(|(byte, wanted)| wanted.is_none_or(|wanted| wanted == *byte))
    };
    let starts =
        (0..bytes.len().saturating_sub(pattern.len() - 1)).filter(|at| bytes[*at] == first);
    let mut found = starts.filter(|at| fits(&&bytes[*at..*at + pattern.len()]));
    let place = found.next()?;
    found.next().is_none().then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of Debian's 10.0, some of those around them, and other bytes behind.
    fn program() -> Vec<u8> {
        let call = "0f 1f 40 00 89 b3 10 d7 ff ff c7 83 e4 33 00 00 00 00 00 00 48 c7 83 e8 33 00 \
             00 ff ff ff ff \
                    f6 05 9a a7 3c 01 02 0f 85 6c 01 00 00 ba 01 00 00 00 48 89 df e8 77 a6 06 00";
        let log = "f6 05 80 a7 3c 01 02 0f 84 65 fe ff ff 8b 93 e0 33 00 00 8b b3 10 d7 ff ff";
        let bytes = pattern(&format!("{call} {log} 90 90"));
        bytes.into_iter().map(|byte| byte.expect("hex")).collect()
    }

    #[test]
    fn the_vector_is_forgotten_and_the_way_out_is_the_same() {
        let mut mended = program();
        let at = 4 + pattern(CALL).len();
        assert_eq!(mend_bytes(&mut mended), Some(true));
        assert_eq!(mended[..at], program()[..at]);
        // The jump starts 15 bytes behind that place instead of 13.
        let cure = "c7 83 10 d7 ff ff ff ff ff ff e9 63 fe ff ff";
        let cure: Vec<u8> = pattern(cure).into_iter().flatten().collect();
        assert_eq!(mended[at..at + cure.len()], cure);
        assert_eq!(mended[at + cure.len()..], program()[at + cure.len()..]);
        let once = mended.clone();
        assert_eq!(mend_bytes(&mut mended), Some(false), "it is mended already");
        assert_eq!(mended, once);
    }

    #[test]
    fn missing_or_ambiguous_place_is_left_unchanged() {
        let mut other = program();
        other[4] = 0x8b;
        let mut twice = [program(), program()].concat();
        for bytes in [&mut other, &mut twice, &mut Vec::new()] {
            let before = bytes.clone();
            assert_eq!(mend_bytes(bytes), None);
            assert_eq!(*bytes, before);
        }
    }

    #[test]
    fn a_program_is_replaced_with_its_rights() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("qemu");
        fs::write(&path, program()).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its rights");
        for _ in 0..2 {
            assert!(matches!(mend(&path), Ok(Mended::Yes)));
            let mode = fs::metadata(&path).expect("it is there").permissions();
            assert_eq!(mode.mode() & 0o777, 0o755);
        }
        assert_ne!(fs::read(&path).expect("a file"), program());
        let left = fs::read_dir(dir.path()).expect("a directory").count();
        assert_eq!(left, 1, "nothing is left beside it");
        fs::write(&path, b"something else").expect("a file");
        assert!(matches!(mend(&path), Ok(Mended::No)));
    }
}
