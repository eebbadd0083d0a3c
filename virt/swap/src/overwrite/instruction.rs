//! The instruction's bytes: REP STOS and REP MOVS of 64-bit mode with 64-bit addresses, and nothing
//! else.
//!
//! ```text
//! [F2 F3 66 26 2E 36 3E]*  [40..4F]  opcode      at most 15 bytes; at least one F2 or F3
//!  legacy prefixes          REX      A4 MOVSB   A5 MOVSW/D/Q   AA STOSB   AB STOSW/D/Q
//! ```
//! * F3 and F2 repeat STOS and MOVS alike: only CMPS and SCAS look at ZF.
//! * 66 makes A5 and AB 16 bits wide, unless REX.W makes them 64 bits wide; A4 and AA are bytes
//!   whatever stands before them.
//! * 26, 2E, 36, 3E (ES, CS, SS, DS) change nothing: those segments start at 0 in 64-bit mode.
//!   REX.R, X and B change nothing.
//!
//! Left out, as something else: 64 and 65 (FS and GS, whose bases count for the source of MOVS), 67
//! (ECX, ESI and EDI), F0 (invalid here), and a REX that is not right before the opcode, which
//! would be without effect.

/// Most bytes of an instruction; a longer one is a general-protection exception.
pub(super) const MAX_LEN: usize = 15;

/// Operation that is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// Stores RAX to \[RDI\].
    Stos,
    /// Copies \[RSI\] to \[RDI\].
    Movs,
}

/// A REP STOS or REP MOVS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Repeated {
    pub(super) operation: Operation,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub(super) size: u64,
    /// Bytes of the instruction, 2 to [`MAX_LEN`].
    pub(super) len: u64,
}

/// Result of decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decoded {
    Repeated(Repeated),
    /// Any other instruction, or none.
    Other,
    /// They end before the instruction does.
    Truncated,
}

/// Decodes the instruction at the start of `bytes`, of which no more than [`MAX_LEN`] are looked
/// at.
pub(super) fn decode(bytes: &[u8]) -> Decoded {
    let bytes = &bytes[..bytes.len().min(MAX_LEN)];
    let mut is_repeated = false;
    let mut is_word = false;
    let mut at = 0;
    // Each prefix takes a byte, so this ends within `bytes`.
    loop {
        match bytes.get(at) {
            Some(0xf2 | 0xf3) => is_repeated = true,
            Some(0x66) => is_word = true,
            Some(0x26 | 0x2e | 0x36 | 0x3e) => {}
            _ => break,
        }
        at += 1;
    }
    let mut is_quadword = false;
    if let Some(rex @ 0x40..=0x4f) = bytes.get(at) {
        is_quadword = rex & 8 != 0;
        at += 1;
    }
    let Some(opcode) = bytes.get(at) else {
        return Decoded::Truncated;
    };
    let operation = match opcode {
        0xaa | 0xab => Operation::Stos,
        0xa4 | 0xa5 => Operation::Movs,
        _ => return Decoded::Other,
    };
    if !is_repeated {
        return Decoded::Other;
    }
    let size = match (opcode & 1, is_quadword, is_word) {
        (0, _, _) => 1,
        (_, true, _) => 8,
        (_, false, true) => 2,
        (_, false, false) => 4,
    };
    Decoded::Repeated(Repeated {
        operation,
        size,
        len: at as u64 + 1,
    })
}
