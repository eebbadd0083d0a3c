// SPDX-License-Identifier: GPL-2.0
/*
 * Cases of accesses: single bytes at both ends of mappings, with neighbours that were mapped
 * before, after or not at all (VIRTIO 1.3, 5.13.6.5: PA = VA - virt_start + phys_start); reports
 * of those that are refused (5.13.6.9); the field bypass (5.13.4) and resets (5.13.5).
 *
 * Neighbours in I/O virtual addresses are none in memory: page 8 of what is watched lies between
 * 2 and 14.
 */
#include "cases.h"

#define BEFORE	14
#define OWN	8
#define BEHIND	2

static void own(struct run *run) { map(run, first(run), AT, 1, OWN, R | W); }
static void before(struct run *run) { map(run, first(run), AT - PAGES(1), 1, BEFORE, R | W); }
static void behind(struct run *run) { map(run, first(run), AT + PAGES(1), 1, BEHIND, R | W); }
static void first_byte(struct run *run) { access(run, AT, 1); }
static void last_byte(struct run *run) { access(run, LAST(1), 1); }

static void bytes_alone(struct run *run)
{
	open_domain(run, first(run));
	own(run);
	first_byte(run);
	last_byte(run);
	access(run, AT - 1, 1);
	access(run, LAST(1) + 1, 1);
}

static void bytes_with(struct run *run, void (*one)(struct run *), void (*two)(struct run *),
		       void (*three)(struct run *))
{
	open_domain(run, first(run));
	one(run);
	two(run);
	if (three)
		three(run);
	first_byte(run);
	last_byte(run);
}

static void bytes_behind_mapped_later(struct run *run) { bytes_with(run, own, behind, NULL); }
static void bytes_behind_mapped_earlier(struct run *run) { bytes_with(run, behind, own, NULL); }
static void bytes_before_mapped_later(struct run *run) { bytes_with(run, own, before, NULL); }
static void bytes_before_mapped_earlier(struct run *run) { bytes_with(run, before, own, NULL); }
static void bytes_between_ascending(struct run *run) { bytes_with(run, before, own, behind); }
static void bytes_between_descending(struct run *run) { bytes_with(run, behind, own, before); }

/* Whatever order a device looks for mappings in: here the one behind was neither first nor last. */
static void bytes_under_a_third(struct run *run)
{
	open_domain(run, first(run));
	behind(run);
	map(run, first(run), AT + PAGES(16), 1, 20, R | W);
	own(run);
	first_byte(run);
	last_byte(run);
}

static void bytes_of_a_hole(struct run *run) { bytes_with(run, before, behind, NULL); }

static void byte_before_a_mapping(struct run *run)
{
	open_domain(run, first(run));
	behind(run);
	last_byte(run);
}

static void byte_behind_a_mapping(struct run *run)
{
	open_domain(run, first(run));
	before(run);
	first_byte(run);
}

static void byte_before_a_reused_page(struct run *run)
{
	bytes_with(run, own, behind, NULL);
	unmap(run, first(run), AT, LAST(1));
	last_byte(run);
}

static void bytes_of_a_long_mapping(struct run *run)
{
	open_domain(run, first(run));
	map(run, first(run), AT, 3, OWN, R | W);
	first_byte(run);
	last_byte(run);
	access(run, AT + PAGES(1), 1);
	access(run, LAST(3), 1);
	access(run, LAST(3) + 1, 1);
}

static void across_two_mappings(struct run *run)
{
	open_domain(run, first(run));
	own(run);
	behind(run);
	access(run, LAST(1), 2);
}

static void across_an_end(struct run *run)
{
	open_domain(run, first(run));
	own(run);
	access(run, LAST(1), 2);
}

static void across_into_read_only(struct run *run)
{
	open_domain(run, first(run));
	own(run);
	map(run, first(run), AT + PAGES(1), 1, BEHIND, R);
	access(run, LAST(1), 2);
}

/* Reports */

static void fault_not_mapped(struct run *run)
{
	open_domain(run, first(run));
	access(run, AT + 0x123, 1);
	fault(run);
}

static void fault_read_only(struct run *run)
{
	open_domain(run, first(run));
	map(run, first(run), AT, 1, OWN, R);
	access(run, AT + 0x123, 1);
	fault(run);
}

static void fault_not_attached(struct run *run)
{
	access(run, watched(run, OWN), 1);
	/* The ring is the first that it cannot reach, at an address of Linux's choice. */
	fault(run);
}

/* A report that no buffer has room for is dropped, or waits: nothing else suffers. */
static void fault_without_room(struct run *run)
{
	unsigned int i;

	open_domain(run, first(run));
	for (i = 0; i < 4; i++)
		access(run, AT + 0x123, 1);
	own(run);
	reach(run);
}

/* The field bypass, and resets */

static void bypass_off(struct run *run)
{
	access(run, watched(run, OWN), 1);
}

static void bypass_on(struct run *run)
{
	iommu_set_bypass(run->iommu, 1);
	access(run, watched(run, OWN), 1);
	iommu_set_bypass(run->iommu, 0);
	access(run, watched(run, OWN), 1);
}

static void bypass_on_while_attached(struct run *run)
{
	iommu_set_bypass(run->iommu, 1);
	open_domain(run, first(run));
	access(run, watched(run, OWN), 1);
	own(run);
	reach(run);
}

static void bypass_of_two(struct run *run)
{
	u8 value;

	iommu_set_bypass(run->iommu, 2);
	value = iommu_bypass(run->iommu);
	say(run, " bypass=%u", value);
}

static void restart(struct run *run)
{
	if (!run->is_over && iommu_start(run->iommu, 0)) {
		say(run, " reset=failed");
		run->is_over = true;
	}
}

static void bypass_after_reset(struct run *run)
{
	iommu_set_bypass(run->iommu, 1);
	restart(run);
	say(run, " bypass=%u", iommu_bypass(run->iommu));
	iommu_set_bypass(run->iommu, 0);
	restart(run);
	say(run, " bypass=%u", iommu_bypass(run->iommu));
}

static void reset_detaches(struct run *run)
{
	open_domain(run, first(run));
	own(run);
	reach(run);
	restart(run);
	reach(run);
	/* And the domain is no more. */
	map(run, first(run), AT + PAGES(8), 1, OWN, R | W);
}

const struct iommu_case access_cases[] = {
	CASE(bytes_alone), CASE(bytes_behind_mapped_later), CASE(bytes_behind_mapped_earlier),
	CASE(bytes_before_mapped_later), CASE(bytes_before_mapped_earlier),
	CASE(bytes_between_ascending), CASE(bytes_between_descending),
	CASE(bytes_under_a_third), CASE(bytes_of_a_hole),
	CASE(byte_before_a_mapping), CASE(byte_behind_a_mapping),
	CASE(byte_before_a_reused_page), CASE(bytes_of_a_long_mapping),
	CASE(across_two_mappings), CASE(across_an_end), CASE(across_into_read_only),
	CASE(fault_not_mapped), CASE(fault_read_only), CASE(fault_not_attached),
	{ "fault_buffers_too_short", fault_without_room, .event_len = 8 },
	CASE(bypass_off), CASE(bypass_on), CASE(bypass_on_while_attached), CASE(bypass_of_two),
	CASE(bypass_after_reset), CASE(reset_detaches),
};
const unsigned int access_case_count = ARRAY_SIZE(access_cases);
