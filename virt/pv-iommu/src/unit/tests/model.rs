//! The unit against a table of pages for each domain.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Step of the model.
#[derive(Clone, Debug)]
enum Step {
    Attach(u8, u32),
    Detach(u8, u32),
    Map(u32, u64, u64, u64, u32),
    Unmap(u32, u64, u64),
    Lease(u8, u64),
    End(usize),
    Poll,
    /// Saves and restores the unit, if there is no lease.
    Save,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let domain = 0..3_u32;
    let step = prop_oneof![
        2 => (0..3_u8, domain.clone()).prop_map(|(own, domain)| Step::Attach(own, domain)),
        1 => (0..3_u8, domain.clone()).prop_map(|(own, domain)| Step::Detach(own, domain)),
        6 => (domain.clone(), 0..24_u64, 1..5_u64, 0..24_u64, 0..4_u32)
            .prop_map(|(domain, page, pages, phys, flags)| Step::Map(domain, page, pages, phys, flags)),
        4 => (domain, 0..24_u64, 1..9_u64).prop_map(|(domain, page, pages)| Step::Unmap(domain, page, pages)),
        3 => (0..3_u8, 0..24_u64).prop_map(|(own, page)| Step::Lease(own, page)),
        3 => any::<usize>().prop_map(Step::End),
        2 => Just(Step::Poll),
        1 => Just(Step::Save),
    ];
    prop::collection::vec(step, 1..150)
}

type Page = (u64, bool, bool, u64);

proptest! {
    /// Compares the unit with a table of pages for each domain, which gives the translation of each
    /// access and the result of each request. No request that removes pages may end while a lease
    /// that began before it is in one of them.
    #[test]
    fn as_a_table_of_pages_has_it(steps in steps()) {
        let mut world = World::new();
        let mut attached: BTreeMap<u16, u32> = BTreeMap::new();
        let mut domains: BTreeMap<u32, BTreeMap<u64, Page>> = BTreeMap::new();
        let mut next_mapping = 0;
        // Leases: name, endpoint, page; and the requests that must outlast each.
        let mut leases: Vec<(LeaseId, u16, u64, Vec<u64>)> = Vec::new();
        let source = |own: u8| SourceId::new(0, 3 + own, 0);
        for step in steps {
            match step {
                Step::Attach(own, domain) => {
                    let source = source(own);
                    let id = world.ask(attach(source, domain, 0));
                    let former = attached.insert(source.0, domain);
                    domains.entry(domain).or_default();
                    if let Some(former) = former.filter(|former| *former != domain) {
                        if !attached.values().any(|other| *other == former) {
                            domains.remove(&former);
                        }
                        for (_, of, page, waits) in &mut leases {
                            // The new domain may map the page to the same place, for the same.
                            let same = |pages: &BTreeMap<u64, Page>| {
                                pages.get(page).filter(|own| own.2).map(|own| own.0)
                            };
                            let there = domains.get(&domain).and_then(same);
                            if *of == source.0 && there.is_none() {
                                waits.push(id);
                            }
                        }
                    }
                }
                Step::Detach(own, domain) => {
                    let source = source(own);
                    let id = world.ask(detach(source, domain));
                    if attached.get(&source.0) != Some(&domain) {
                        prop_assert_eq!(world.answer(id), Some(INVAL));
                        continue;
                    }
                    attached.remove(&source.0);
                    if !attached.values().any(|other| *other == domain) {
                        domains.remove(&domain);
                    }
                    for (_, of, _, waits) in &mut leases {
                        if *of == source.0 {
                            waits.push(id);
                        }
                    }
                }
                Step::Map(domain, page, pages, phys, flags) => {
                    let last = ((page + pages) << 12) - 1;
                    let status = world.status(map(domain, page << 12, last, phys << 12, flags));
                    let Some(table) = domains.get_mut(&domain) else {
                        prop_assert_eq!(status, NOENT);
                        continue;
                    };
                    if table.range(page..page + pages).next().is_some() {
                        prop_assert_eq!(status, INVAL);
                        continue;
                    }
                    prop_assert_eq!(status, 0);
                    next_mapping += 1;
                    for at in 0..pages {
                        let own = (phys + at, flags & 1 != 0, flags & 2 != 0, next_mapping);
                        table.insert(page + at, own);
                    }
                }
                Step::Unmap(domain, page, pages) => {
                    let (first, last) = (page << 12, ((page + pages) << 12) - 1);
                    let id = world.ask(Request::Unmap { domain, first, last });
                    let Some(table) = domains.get_mut(&domain) else {
                        prop_assert_eq!(world.answer(id), Some(NOENT));
                        continue;
                    };
                    let inside: Vec<u64> =
                        table.range(page..page + pages).map(|(_, own)| own.3).collect();
                    let outside = table.iter().filter(|(at, _)| !(page..page + pages).contains(at));
                    if outside.into_iter().any(|(_, own)| inside.contains(&own.3)) {
                        prop_assert_eq!(world.answer(id), Some(RANGE));
                        continue;
                    }
                    if inside.is_empty() {
                        prop_assert_eq!(world.answer(id), Some(0));
                    }
                    for (_, of, at, waits) in &mut leases {
                        let is_gone = (page..page + pages).contains(at) && table.contains_key(at);
                        if is_gone && attached.get(of) == Some(&domain) {
                            waits.push(id);
                        }
                    }
                    table.retain(|at, _| !(page..page + pages).contains(at));
                }
                Step::Lease(own, page) => {
                    let source = source(own);
                    if leases.len() < 60 && world.reach(source, page << 12, Perm::Write).is_some() {
                        let id = world.lease(source, page << 12, 0x1000);
                        leases.push((id, source.0, page, Vec::new()));
                    }
                }
                Step::End(at) => {
                    if !leases.is_empty() {
                        let (id, ..) = leases.swap_remove(at % leases.len());
                        world.unit.leases_mut().end(id);
                    }
                }
                Step::Poll => {
                    let _ = world.poll();
                }
                Step::Save if leases.is_empty() => {
                    while world.poll().is_busy {}
                    world.unit = saved::tests::restored(&world.unit);
                }
                Step::Save => {
                    let is_waited_for = leases.iter().any(|(.., waits)| !waits.is_empty());
                    prop_assert!(!(is_waited_for && world.unit.save().is_some()), "a request \
                         waits");
                }
            }
            for own in 0..3 {
                let source = source(own);
                let table = attached.get(&source.0).and_then(|domain| domains.get(domain));
                for page in 0..33 {
                    for perm in [Perm::Read, Perm::Write] {
                        let own = table.and_then(|table| table.get(&page));
                        let may = own.filter(|own| if perm == Perm::Read { own.1 } else { own.2 });
                        let expected = may.map(|own| (own.0 << 12) + 0xfff);
                        prop_assert_eq!(world.reach(source, (page << 12) + 0xfff, perm), expected);
                    }
                }
            }
            for (_, of, page, waits) in &leases {
                for &id in waits {
                    prop_assert_eq!(world.answer(id), None, "a lease of {:#x} in page \
                         {}", of, page);
                }
            }
        }
        for (id, ..) in leases {
            world.unit.leases_mut().end(id);
        }
        while world.poll().is_busy {}
        for id in 1..=world.asked {
            prop_assert!(world.answer(id).is_some(), "request {} is never answered", id);
        }
    }
}
