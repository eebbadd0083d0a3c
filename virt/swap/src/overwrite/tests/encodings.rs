//! Bytes of instructions and their decoding. All of those that repeat were also run on a processor
//! (AMD EPYC).

use super::Decoded::{Other, Truncated};
use super::Operation::{Movs, Stos};
use super::*;

/// Bytes, operation, and bytes of an element.
pub(super) const REPEATED: &[(&[u8], Operation, u64)] = &[
    // REP STOSB, STOSD, STOSQ, STOSW: F3 AA, F3 AB, F3 REX.W AB, F3 66 AB.
    (&[0xf3, 0xaa], Stos, 1),
    (&[0xf3, 0xab], Stos, 4),
    (&[0xf3, 0x48, 0xab], Stos, 8),
    (&[0xf3, 0x66, 0xab], Stos, 2),
    // REP MOVSB, MOVSD, MOVSQ, MOVSW: F3 A4, F3 A5, F3 REX.W A5, F3 66 A5.
    (&[0xf3, 0xa4], Movs, 1),
    (&[0xf3, 0xa5], Movs, 4),
    (&[0xf3, 0x48, 0xa5], Movs, 8),
    (&[0xf3, 0x66, 0xa5], Movs, 2),
    // Prefixes in another order: the assembler's, and any other.
    (&[0x66, 0xf3, 0xab], Stos, 2),
    (&[0x66, 0xf3, 0xa5], Movs, 2),
    // F2 repeats as F3 does.
    (&[0xf2, 0xaa], Stos, 1),
    (&[0xf2, 0x48, 0xab], Stos, 8),
    (&[0xf2, 0xa4], Movs, 1),
    (&[0xf2, 0x48, 0xa5], Movs, 8),
    (&[0xf3, 0xf2, 0xaa], Stos, 1),
    (&[0xf2, 0xf3, 0xa4], Movs, 1),
    // REX.W counts more than 66, and neither widens a byte.
    (&[0x66, 0xf3, 0x48, 0xab], Stos, 8),
    (&[0xf3, 0x66, 0x48, 0xa5], Movs, 8),
    (&[0xf3, 0x66, 0xaa], Stos, 1),
    (&[0xf3, 0x48, 0xaa], Stos, 1),
    (&[0xf3, 0x48, 0xa4], Movs, 1),
    // REX without W; with all of its bits.
    (&[0xf3, 0x47, 0xab], Stos, 4),
    (&[0xf3, 0x4f, 0xa5], Movs, 8),
    // CS, DS, ES, SS.
    (&[0x2e, 0xf3, 0xab], Stos, 4),
    (&[0xf3, 0x3e, 0x26, 0x36, 0xa5], Movs, 4),
    // Fifteen bytes.
    (
        &[
            0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3, 0xf3,
            0xaa,
        ],
        Stos,
        1,
    ),
];

/// Other instructions, or none.
pub(super) const OTHERS: &[&[u8]] = &[
    // STOSB, STOSQ, MOVSB, MOVSW once.
    &[0xaa],
    &[0x48, 0xab],
    &[0xa4],
    &[0x66, 0xa5],
    // PAUSE, REPE CMPSB, REP LODSQ, REPNE SCASB, REP INSB, REP OUTSD, POPCNT, REP RET, ENDBR64,
    // MOVDQU.
    &[0xf3, 0x90],
    &[0xf3, 0xa6],
    &[0xf3, 0x48, 0xad],
    &[0xf2, 0xae],
    &[0xf3, 0x6c],
    &[0xf3, 0x6f],
    &[0xf3, 0x0f, 0xb8, 0xc0],
    &[0xf3, 0xc3],
    &[0xf3, 0x0f, 0x1e, 0xfa],
    &[0xf3, 0x0f, 0x7f, 0x07],
    // MOV [RDI], RAX; MOVNTI [RDI], RAX; a vector store with VEX.
    &[0x48, 0x89, 0x07],
    &[0x48, 0x0f, 0xc3, 0x07],
    &[0xc5, 0xfe, 0x7f, 0x07],
    // REX before a legacy prefix, and twice.
    &[0x48, 0xf3, 0xab],
    &[0xf3, 0x48, 0x48, 0xab],
    // 32-bit addresses; FS and GS; LOCK.
    &[0xf3, 0x67, 0xab],
    &[0x67, 0xf3, 0x48, 0xa5],
    &[0x64, 0xf3, 0xa4],
    &[0xf3, 0x65, 0xab],
    &[0xf0, 0xf3, 0xaa],
];

#[test]
fn repeated_stores_and_copies_are_known() {
    for &(bytes, operation, size) in REPEATED {
        let repeated = Repeated {
            operation,
            size,
            len: bytes.len() as u64,
        };
        assert_eq!(
            decode(bytes),
            Decoded::Repeated(repeated),
            "{bytes:02x?} alone"
        );
        let mut followed = bytes.to_vec();
        followed.extend([0xf3, 0x48, 0xab]);
        assert_eq!(
            decode(&followed),
            Decoded::Repeated(repeated),
            "{bytes:02x?} followed"
        );
    }
}

#[test]
fn nothing_else_is() {
    for bytes in OTHERS {
        assert_eq!(decode(bytes), Other, "{bytes:02x?}");
    }
}

#[test]
fn an_instruction_without_its_end_is_truncated() {
    for &(bytes, ..) in REPEATED {
        for len in 0..bytes.len() {
            assert_eq!(
                decode(&bytes[..len]),
                Truncated,
                "{len} bytes of {bytes:02x?}"
            );
        }
    }
}

#[test]
fn a_sixteenth_byte_is_not_looked_at() {
    let mut bytes = [0xf3; 16];
    bytes[15] = 0xaa;
    assert_eq!(decode(&bytes), Truncated);
}
