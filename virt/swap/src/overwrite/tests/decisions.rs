//! Decisions on one page and one instruction, and every condition without which the result is
//! undecided.

use super::*;

const STOSQ: &[u8] = &[0xf3, 0x48, 0xab];
const MOVSQ: &[u8] = &[0xf3, 0x48, 0xa5];
const MOVSB: &[u8] = &[0xf3, 0xa4];

/// Creates a guest with this instruction at the RIP of [`kernel`], and the page that it stores to
/// absent.
fn guest(code: &[u8]) -> Guest {
    let mut guest = Guest::new();
    guest.code(CODE + 0x100, code);
    for (frame, seed) in SOURCE_FRAMES.into_iter().zip([3, 5]) {
        let bytes: Vec<u8> = (0..PAGE_LEN).map(|i| (i * seed / 7) as u8).collect();
        guest.store(frame * 0x1000, &bytes);
    }
    guest.absent.insert(TARGET_FRAME);
    guest.forbidden = Some(TARGET_FRAME);
    guest
}

fn target() -> Gpa {
    Gpa::new(TARGET_FRAME * 0x1000)
}

fn decided(guest: &mut Guest, registers: &Registers) -> Option<Overwrite> {
    decide(registers, guest, target())
}

/// Returns the content of the page after the overwrite.
fn content(guest: &mut Guest, overwrite: &Overwrite) -> Option<Vec<u8>> {
    let mut page = [0xee; PAGE_LEN];
    overwrite.content(guest, &mut page)?;
    Some(page.to_vec())
}

#[test]
fn all_encodings_overwrite_a_page() {
    for &(code, operation, size) in encodings::REPEATED {
        let mut guest = guest(code);
        let before = kernel();
        let overwrite = decided(&mut guest, &before).expect("decided");
        let rsi = match operation {
            Operation::Stos => before.rsi,
            Operation::Movs => before.rsi + 4096,
        };
        assert_eq!(
            overwrite.after(),
            &Registers {
                rcx: before.rcx - 4096 / size,
                rdi: before.rdi + 4096,
                rsi,
                ..before
            },
            "{code:02x?}"
        );
    }
    for code in encodings::OTHERS {
        assert_eq!(decided(&mut guest(code), &kernel()), None, "{code:02x?}");
    }
}

#[test]
fn stos_fills_with_the_lowest_bytes_of_rax() {
    for (code, pattern) in [
        (&[0xf3, 0xaa][..], [0x88; 8]),
        (
            &[0xf3, 0x66, 0xab],
            [0x88, 0x77, 0x88, 0x77, 0x88, 0x77, 0x88, 0x77],
        ),
        (
            &[0xf3, 0xab],
            [0x88, 0x77, 0x66, 0x55, 0x88, 0x77, 0x66, 0x55],
        ),
        (STOSQ, [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]),
    ] {
        let mut guest = guest(code);
        let overwrite = decided(&mut guest, &kernel()).expect("decided");
        assert_eq!(overwrite.effect(), Effect::Fill(pattern));
        let page = content(&mut guest, &overwrite).expect("needs no memory");
        assert_eq!(page, pattern.repeat(512));
    }
}

#[test]
fn movs_copies_from_one_page_or_two() {
    let mut guest = guest(MOVSQ);
    let overwrite = decided(&mut guest, &kernel()).expect("decided");
    let whole = Source {
        start: Gpa::new(24 * 0x1000),
        rest: None,
    };
    assert_eq!(overwrite.effect(), Effect::Copy(whole));
    let page = content(&mut guest, &overwrite).expect("present");
    assert_eq!(page, guest.frame(24));

    // From the middle of an element on, as REP MOVSQ may.
    let registers = Registers {
        rsi: SOURCE + 0xabd,
        ..kernel()
    };
    let overwrite = decided(&mut guest, &registers).expect("decided");
    let parts = Source {
        start: Gpa::new(24 * 0x1000 + 0xabd),
        rest: Some(Gpa::new(27 * 0x1000)),
    };
    assert_eq!(overwrite.effect(), Effect::Copy(parts));
    assert_eq!(overwrite.after().rsi, SOURCE + 0x1abd);
    let page = content(&mut guest, &overwrite).expect("present");
    let expected = [&guest.frame(24)[0xabd..], &guest.frame(27)[..0xabd]].concat();
    assert_eq!(page, expected);
}

#[test]
fn the_last_page_completes_the_instruction() {
    for (code, rcx, len) in [(STOSQ, 512, 3), (MOVSB, 4096, 2)] {
        // A processor saves RF when it faults, and clears it when the instruction completes.
        let before = Registers { rcx, ..kernel() };
        assert_eq!(before.rflags, 0x1_0246);
        let overwrite = decided(&mut guest(code), &before).expect("decided");
        let after = overwrite.after();
        assert_eq!((after.rcx, after.rip), (0, before.rip + len));
        assert_eq!(after.rflags, 0x246);

        let fewer = Registers {
            rcx: rcx - 1,
            ..kernel()
        };
        assert_eq!(decided(&mut guest(code), &fewer), None);
        let more = Registers {
            rcx: rcx + 1,
            rflags: 0x246,
            ..kernel()
        };
        let overwrite = decided(&mut guest(code), &more).expect("decided");
        let after = overwrite.after();
        assert_eq!((after.rcx, after.rip), (1, more.rip));
        assert_eq!(after.rflags, 0x1_0246);
    }
    let none = Registers { rcx: 0, ..kernel() };
    assert_eq!(decided(&mut guest(STOSQ), &none), None);
    // The largest number: no product of RCX and size may overflow.
    let most = Registers {
        rcx: u64::MAX,
        ..kernel()
    };
    let overwrite = decided(&mut guest(STOSQ), &most).expect("decided");
    assert_eq!(overwrite.after().rcx, u64::MAX - 512);
}

/// Changes registers.
type Change = fn(&mut Registers);

#[test]
fn unusual_register_states_are_undecided() {
    let changes: &[(&str, Change)] = &[
        ("RDI in the page", |r| r.rdi += 8),
        ("RDI in the page before", |r| r.rdi -= 8),
        ("RDI at another page", |r| r.rdi = SOURCE),
        ("RDI at no page", |r| r.rdi = BASE + 0x5000),
        ("RDI not canonical", |r| r.rdi &= !(1 << 60)),
        ("DF", |r| r.rflags |= 1 << 10),
        ("TF", |r| r.rflags |= 1 << 8),
        ("L0", |r| r.dr7 |= 1 << 0),
        ("G3", |r| r.dr7 |= 1 << 7),
        ("an event", |r| r.is_at_instruction = false),
        ("no paging", |r| r.cr0 &= !(1 << 31)),
        ("real mode", |r| r.cr0 &= !1),
        ("no PAE", |r| r.cr4 &= !(1 << 5)),
        ("LA57 without such tables", |r| r.cr4 |= 1 << 12),
        ("VMXE", |r| r.cr4 |= 1 << 13),
        ("PKS", |r| r.cr4 |= 1 << 24),
        ("LASS", |r| r.cr4 |= 1 << 27),
        ("CR4 of the future", |r| r.cr4 |= 1 << 63),
        ("LME clear", |r| r.efer &= !(1 << 8)),
        ("LMA clear", |r| r.efer &= !(1 << 10)),
        ("SVME", |r| r.efer |= 1 << 12),
        ("LMSLE", |r| r.efer |= 1 << 13),
        ("compatibility mode", |r| r.cs_l = false),
        ("D of 64-bit code", |r| r.cs_d = true),
        ("a user, of a kernel's pages", |r| r.cpl = 3),
        ("no such level", |r| r.cpl = 4),
        ("other tables", |r| r.cr3 = 0x7000),
        ("tables beyond memory", |r| r.cr3 = 0x7fff_f000),
        ("no code", |r| r.rip = BASE + 0x5000),
        ("other code", |r| r.rip += 1),
    ];
    for code in [STOSQ, MOVSQ] {
        for (name, change) in changes {
            let mut registers = kernel();
            change(&mut registers);
            // One byte further on is a STOSQ or MOVSQ once, with or without REX.
            assert_eq!(decided(&mut guest(code), &registers), None, "{name}");
        }
    }
}

#[test]
fn a_source_that_cannot_be_read_is_undecided() {
    let changes: &[(&str, Change)] = &[
        ("not mapped", |r| r.rsi = BASE + 0x5000),
        ("second page not mapped", |r| r.rsi = SOURCE + 0x1008),
        ("not canonical", |r| r.rsi &= !(1 << 60)),
        ("across the end of the lower half", |r| {
            r.rsi = 0x7fff_ffff_f800
        }),
        ("across the end", |r| r.rsi = 0xffff_ffff_ffff_f800),
    ];
    for (name, change) in changes {
        let mut registers = kernel();
        change(&mut registers);
        assert!(decided(&mut guest(STOSQ), &registers).is_some(), "{name}");
        assert_eq!(decided(&mut guest(MOVSQ), &registers), None, "{name}");
    }
}

#[test]
fn the_page_is_no_copy_of_itself() {
    let mut guest = guest(MOVSB);
    // Whether it is absent or not.
    guest.absent.clear();
    for rsi in [TARGET, TARGET - 0x800, TARGET + 0x800, TARGET + 1] {
        for neighbour in [TARGET - 0x1000, TARGET + 0x1000] {
            guest.map(neighbour, 30, KERNEL);
        }
        let registers = Registers { rsi, ..kernel() };
        assert_eq!(decided(&mut guest, &registers), None, "{rsi:#x}");
    }
    // By another linear address.
    guest.map(SOURCE + 0x1000, TARGET_FRAME, KERNEL);
    let second = Registers {
        rsi: SOURCE + 1,
        ..kernel()
    };
    assert_eq!(decided(&mut guest, &second), None);
    // Up to the page, and from the page behind it on.
    for rsi in [TARGET - 0x1000, TARGET + 0x1000] {
        let registers = Registers { rsi, ..kernel() };
        assert!(decided(&mut guest, &registers).is_some(), "{rsi:#x}");
    }
}

#[test]
fn nothing_is_decided_by_what_is_absent() {
    let across = Registers {
        rip: CODE + 0xffe,
        rsi: SOURCE + 8,
        ..kernel()
    };
    let place = |guest: &mut Guest| guest.code(across.rip, MOVSQ);
    let mut complete = guest(MOVSQ);
    place(&mut complete);
    assert!(decided(&mut complete, &across).is_some());
    for absent in [
        1,
        2,
        3,
        4,
        CODE_FRAMES[0],
        CODE_FRAMES[1],
        SOURCE_FRAMES[0],
        SOURCE_FRAMES[1],
    ] {
        let mut guest = guest(MOVSQ);
        place(&mut guest);
        guest.absent.insert(absent);
        assert_eq!(decided(&mut guest, &across), None, "frame {absent}");
    }
}

#[test]
fn tables_and_code_in_the_page_are_not_looked_at() {
    // The guest's page table, or its code, lies in the page that is overwritten. `forbidden`
    // panics.
    for frame in [1, 2, 3, 4, CODE_FRAMES[0]] {
        let mut guest = guest(STOSQ);
        guest.map(TARGET, frame, KERNEL);
        guest.forbidden = Some(frame);
        guest.absent.insert(frame);
        assert_eq!(
            decide(&kernel(), &mut guest, Gpa::new(frame * 0x1000)),
            None
        );
    }
}

#[test]
fn a_source_that_leaves_memory_has_no_content() {
    let registers = Registers {
        rsi: SOURCE + 8,
        ..kernel()
    };
    for frame in SOURCE_FRAMES {
        let mut guest = guest(MOVSQ);
        let overwrite = decided(&mut guest, &registers).expect("decided");
        guest.absent.insert(frame);
        assert_eq!(content(&mut guest, &overwrite), None);
    }
}

#[test]
fn code_may_lie_across_pages_and_end_at_one() {
    for &(code, ..) in encodings::REPEATED {
        for first in 0..=code.len() as u64 {
            let rip = CODE + 0x1000 - first;
            let mut guest = guest(code);
            guest.code(rip, code);
            let registers = Registers {
                rip,
                rcx: 4096,
                ..kernel()
            };
            let overwrite = decided(&mut guest, &registers).expect("decided");
            // The second page counts only if part of the instruction lies in it.
            guest.absent.insert(CODE_FRAMES[1]);
            let is_needed = first < code.len() as u64;
            let expected = (!is_needed).then_some(overwrite);
            assert_eq!(decided(&mut guest, &registers), expected);
        }
    }
    // Fifteen prefixes, then an opcode: too long.
    let mut code = vec![0xf3; 15];
    code.push(0xaa);
    assert_eq!(decided(&mut guest(&code), &kernel()), None);
    for first in 1..16 {
        let rip = CODE + 0x1000 - first;
        let mut guest = guest(&code);
        guest.code(rip, &code);
        assert_eq!(decided(&mut guest, &Registers { rip, ..kernel() }), None);
    }
}

#[test]
fn the_end_of_the_lower_half_is_the_end() {
    // Entry 255 of the PML4, and the last entry of each table below: 0x7fff_ffff_f000.
    let mut guest = guest(STOSQ);
    guest.put(0x17f8, 0x5000 | KERNEL);
    guest.put(0x5ff8, 0x6000 | KERNEL);
    guest.put(0x6ff8, 0x7000 | KERNEL);
    guest.put(0x7ff8, (40 * 0x1000) | KERNEL);
    guest.store(40 * 0x1000 + 0xffd, STOSQ);
    let at_the_end = Registers {
        rip: 0x7fff_ffff_fffd,
        ..kernel()
    };
    // RIP would be 0x8000_0000_0000 afterwards.
    assert_eq!(decided(&mut guest, &at_the_end), None);
    guest.store(40 * 0x1000 + 0xffc, STOSQ);
    let before_it = Registers {
        rip: 0x7fff_ffff_fffc,
        ..kernel()
    };
    assert!(decided(&mut guest, &before_it).is_some());

    // The page itself may be the last one; the address in RDI after it concerns the next iteration.
    guest.put(0x7ff8, (TARGET_FRAME * 0x1000) | KERNEL);
    let last_page = Registers {
        rdi: 0x7fff_ffff_f000,
        ..kernel()
    };
    let overwrite = decided(&mut guest, &last_page).expect("decided");
    assert_eq!(overwrite.after().rdi, 0x8000_0000_0000);
}

#[test]
fn addresses_wrap_as_the_processor_s_do() {
    // The last page of all, entry 511 of every table, is target or source.
    for (code, frame) in [(STOSQ, TARGET_FRAME), (MOVSQ, SOURCE_FRAMES[0])] {
        let mut guest = guest(code);
        guest.put(0x1ff8, 0x5000 | KERNEL);
        guest.put(0x5ff8, 0x6000 | KERNEL);
        guest.put(0x6ff8, 0x7000 | KERNEL);
        guest.put(0x7ff8, (frame * 0x1000) | KERNEL);
        let last = 0xffff_ffff_ffff_f000;
        let registers = match frame {
            TARGET_FRAME => Registers {
                rdi: last,
                ..kernel()
            },
            _ => Registers {
                rsi: last,
                ..kernel()
            },
        };
        let overwrite = decided(&mut guest, &registers).expect("decided");
        let after = overwrite.after();
        let wrapped = match frame {
            TARGET_FRAME => after.rdi,
            _ => after.rsi,
        };
        assert_eq!(wrapped, 0);
        // A source that wraps to 0 is undecided.
        let registers = Registers {
            rsi: last + 8,
            ..kernel()
        };
        if frame != TARGET_FRAME {
            assert_eq!(decided(&mut guest, &registers), None);
        }
    }
}

#[test]
fn a_user_s_alignment_may_be_checked() {
    let mut guest = guest(MOVSQ);
    for at in [0x1800, 0x2000, 0x3000] {
        let entry = guest.word(Gpa::new(at)).unwrap();
        guest.put(at, entry | 4);
    }
    guest.map(CODE, CODE_FRAMES[0], USER);
    guest.map(TARGET, TARGET_FRAME, USER);
    guest.map(SOURCE, SOURCE_FRAMES[0], USER);
    guest.map(SOURCE + 0x1000, SOURCE_FRAMES[1], USER);
    // CR0.AM and RFLAGS.AC.
    let checked = Registers {
        rsi: SOURCE + 4,
        rflags: 0x4_0202,
        ..user()
    };
    assert_eq!(checked.cr0 & 0x4_0000, 0x4_0000);
    assert_eq!(decided(&mut guest, &checked), None);
    for unchecked in [
        Registers {
            rsi: SOURCE + 8,
            ..checked
        },
        Registers {
            rflags: 0x202,
            ..checked
        },
        Registers {
            cr0: 0x8001_0033,
            ..checked
        },
    ] {
        assert!(decided(&mut guest, &unchecked).is_some());
    }
}

#[test]
fn a_page_that_would_get_dirty_is_left_to_the_processor() {
    for code in [STOSQ, MOVSQ] {
        // Read-only; not accessed; not dirty.
        for flags in [0x061, 0x043, 0x023] {
            let mut guest = guest(code);
            guest.map(TARGET, TARGET_FRAME, flags);
            assert_eq!(decided(&mut guest, &kernel()), None, "{flags:#x}");
        }
        // Code and source are only read, and code may be executed.
        let mut guest = guest(code);
        guest.map(CODE, CODE_FRAMES[0], 0x021);
        guest.map(SOURCE, SOURCE_FRAMES[0], 0x8000_0000_0000_0021);
        assert!(decided(&mut guest, &kernel()).is_some());
        guest.map(CODE, CODE_FRAMES[0], 0x8000_0000_0000_0021);
        assert_eq!(decided(&mut guest, &kernel()), None);
    }
}

#[test]
fn address_within_a_page_is_undecided() {
    let registers = Registers {
        rdi: TARGET + 8,
        ..kernel()
    };
    let mut guest = guest(STOSQ);
    for registers in [kernel(), registers] {
        let within = Gpa::new(target().raw() + 8);
        assert_eq!(decide(&registers, &mut guest, within), None);
    }
}

#[test]
fn a_decision_asks_a_bounded_number_of_times() {
    let mut guest = guest(MOVSQ);
    let across = Registers {
        rip: CODE + 0xffe,
        rsi: SOURCE + 8,
        ..kernel()
    };
    guest.code(across.rip, MOVSQ);
    guest.asked = 0;
    assert!(decided(&mut guest, &across).is_some());
    // Five walks of four entries, the instruction's two parts, the source's two pages.
    assert_eq!(guest.asked, 5 * 4 + 2 + 2);
}
