// SPDX-License-Identifier: GPL-2.0
/*
 * Cases of requests, by the section of VIRTIO 1.3 that each is about: how they are put, ATTACH,
 * DETACH, PROBE.
 */
#include "cases.h"

/* How a request is put: 5.13.6, and 2.7.4 for descriptors */

static void send_attach(struct run *run, unsigned int out_len, unsigned int in_len,
			unsigned int out_cut, unsigned int in_cut)
{
	make_attach(run, first(run), run->endpoint, 0);
	send(run, &(struct cut) {
		.name = "attach",
		.out_len = out_len,
		.in_len = in_len,
		.out_cut = out_cut,
		.in_cut = in_cut,
	});
}

#define ATTACH_LEN	offsetof(struct virtio_iommu_req_attach, tail)

static void tail_absent(struct run *run) { send_attach(run, ATTACH_LEN, 0, 0, 0); }
static void tail_of_three_bytes(struct run *run) { send_attach(run, ATTACH_LEN, 3, 0, 0); }
static void tail_in_two_pieces(struct run *run) { send_attach(run, ATTACH_LEN, 4, 0, 2); }
static void tail_bytewise(struct run *run) { send_attach(run, ATTACH_LEN, 4, 0, 1); }
static void request_in_pieces(struct run *run) { send_attach(run, ATTACH_LEN, 4, 3, 0); }
static void head_absent(struct run *run) { send_attach(run, 0, 4, 0, 0); }
static void head_of_three_bytes(struct run *run) { send_attach(run, 3, 4, 0, 0); }
static void attach_too_short(struct run *run) { send_attach(run, ATTACH_LEN - 1, 4, 0, 0); }

static void after_a_bad_one(struct run *run)
{
	attach_too_short(run);
	attach(run, first(run), run->endpoint, 0);
}

static void map_too_short(struct run *run)
{
	unsigned int len;

	open_domain(run, first(run));
	len = make_map(run, first(run), AT, LAST(1), watched(run, 2), R | W);
	send(run, &(struct cut) { .name = "map", .out_len = len - 1, .in_len = TAIL });
	reach(run);
}

static void unmap_too_short(struct run *run)
{
	unsigned int len;

	one_page(run);
	len = make_unmap(run, first(run), AT, LAST(1));
	send(run, &(struct cut) { .name = "unmap", .out_len = len - 1, .in_len = TAIL });
	reach(run);
}

static void tail_reserved(struct run *run)
{
	const u8 *tail = run->iommu->in;

	attach(run, first(run), run->endpoint, 0);
	if (!run->is_over)
		say(run, " reserved=%02x%02x%02x", tail[1], tail[2], tail[3]);
}

static void send_type(struct run *run, u8 type)
{
	unsigned int len = make_attach(run, first(run), run->endpoint, 0);

	*run->iommu->out = type;
	send(run, &(struct cut) { .name = "request", .out_len = len, .in_len = TAIL });
}

static void type_zero(struct run *run) { send_type(run, 0); }
static void type_six(struct run *run) { send_type(run, 6); }
static void type_255(struct run *run) { send_type(run, 255); }

static void head_reserved(struct run *run)
{
	unsigned int len = make_attach(run, first(run), run->endpoint, 0);

	memset(run->iommu->out + 1, 0xff, 3);
	send(run, &(struct cut) { .name = "attach", .out_len = len, .in_len = TAIL });
}

/* ATTACH: 5.13.6.3 */

static void attach_endpoint_unknown(struct run *run)
{
	attach(run, first(run), 0xfff8, 0);
	attach(run, first(run), U32_MAX, 0);
}

static void attach_reserved(struct run *run)
{
	unsigned int len = make_attach(run, first(run), run->endpoint, 0);

	run->iommu->out[len - 1] = 1;
	send(run, &(struct cut) { .name = "attach", .out_len = len, .in_len = TAIL });
	/* And so it is in no domain. */
	map(run, first(run), AT, 1, 2, R | W);
}

static void attach_flag_unknown(struct run *run)
{
	attach(run, first(run), run->endpoint, 1U << 1);
	attach(run, first(run), run->endpoint, 1U << 31);
}

static void attach_bypass_not_negotiated(struct run *run)
{
	attach(run, first(run), run->endpoint, BYPASS);
}

static void attach_again(struct run *run)
{
	one_page(run);
	attach(run, first(run), run->endpoint, 0);
	reach(run);
}

static void attach_elsewhere(struct run *run)
{
	one_page(run);
	open_domain(run, second(run));
	reach(run);
	/* It was alone in the first, which is no more. */
	map(run, first(run), AT, 1, 4, R | W);
}

static void attach_elsewhere_with_company(struct run *run)
{
	one_page(run);
	attach(run, first(run), run->other, 0);
	open_domain(run, second(run));
	map(run, second(run), AT, 1, 4, R | W);
	reach(run);
	attach(run, first(run), run->endpoint, 0);
	reach(run);
}

static void attach_shared(struct run *run)
{
	one_page(run);
	attach(run, first(run), run->other, 0);
	detach(run, first(run), run->other);
	reach(run);
}

static void attach_bypass_to_plain(struct run *run)
{
	one_page(run);
	attach(run, first(run), run->other, BYPASS);
	reach(run);
}

static void attach_bypass_to_own_plain(struct run *run)
{
	one_page(run);
	attach(run, first(run), run->endpoint, BYPASS);
	reach(run);
}

static void attach_plain_to_bypass(struct run *run)
{
	attach(run, first(run), run->endpoint, BYPASS);
	attach(run, first(run), run->other, 0);
}

static void attach_bypass(struct run *run)
{
	attach(run, first(run), run->endpoint, BYPASS);
	access(run, watched(run, 2) + PAGE_SIZE - 1, 1);
}

static void attach_last_domain(struct run *run)
{
	attach(run, run->iommu->domain_last, run->endpoint, 0);
	detach(run, run->iommu->domain_last, run->endpoint);
}

static void attach_domain_above_range(struct run *run)
{
	if (run->iommu->domain_last == U32_MAX)
		say(run, " n/a");
	else
		attach(run, run->iommu->domain_last + 1, run->endpoint, 0);
}

/* DETACH: 5.13.6.4 */

static void detach_ends_access(struct run *run)
{
	one_page(run);
	reach(run);
	detach(run, first(run), run->endpoint);
	reach(run);
}

static void detach_endpoint_unknown(struct run *run)
{
	attach(run, first(run), run->endpoint, 0);
	detach(run, first(run), 0xfff8);
}

static void detach_not_attached(struct run *run)
{
	detach(run, first(run), run->endpoint);
}

static void detach_from_another(struct run *run)
{
	one_page(run);
	attach(run, second(run), run->other, 0);
	detach(run, second(run), run->endpoint);
	reach(run);
}

static void detach_reserved(struct run *run)
{
	unsigned int len;

	attach(run, first(run), run->endpoint, 0);
	len = make_detach(run, first(run), run->endpoint);
	memset(run->iommu->out + len - 8, 0xff, 8);
	send(run, &(struct cut) { .name = "detach", .out_len = len, .in_len = TAIL });
}

static void domain_made_anew(struct run *run)
{
	one_page(run);
	detach(run, first(run), run->endpoint);
	open_domain(run, first(run));
	reach(run);
	map(run, first(run), AT, 1, 4, R | W);
	reach(run);
}

/* PROBE: 5.13.6.7 */

static void probe_endpoint(struct run *run)
{
	probe(run, run->endpoint);
}

static void probe_rest(struct run *run)
{
	const u8 *bytes = run->iommu->in;
	u32 size = run->iommu->probe_size, at = 0;

	probe(run, run->endpoint);
	if (run->is_over)
		return;
	while (at + 4 <= size && (bytes[at] || bytes[at + 1] & 0xf))
		at += 4 + (bytes[at + 2] | bytes[at + 3] << 8);
	say(run, " rest=%s", at > size ? "beyond" :
	    memchr_inv(bytes + at, 0, size - at) ? "dirty" : "zero");
}

static void probe_endpoint_unknown(struct run *run)
{
	probe(run, 0xfff8);
}

static void send_probe(struct run *run, unsigned int out_less, unsigned int properties)
{
	unsigned int len = make_probe(run, run->endpoint);

	send(run, &(struct cut) {
		.name = "probe",
		.out_len = len - out_less,
		.in_len = properties + TAIL,
		.tail_at = properties,
	});
}

static void probe_list_too_short(struct run *run)
{
	send_probe(run, 0, run->iommu->probe_size - 4);
}

static void probe_no_list(struct run *run) { send_probe(run, 0, 0); }

static void probe_too_short(struct run *run)
{
	send_probe(run, 1, run->iommu->probe_size);
}

static void probe_reserved(struct run *run)
{
	unsigned int len = make_probe(run, run->endpoint);
	u32 size = run->iommu->probe_size;

	memset(run->iommu->out + len - 64, 0xff, 64);
	send(run, &(struct cut) {
		.name = "probe",
		.out_len = len,
		.in_len = size + TAIL,
		.tail_at = size,
	});
}

const struct iommu_case request_cases[] = {
	CASE(tail_absent), CASE(tail_of_three_bytes), CASE(tail_in_two_pieces),
	CASE(tail_bytewise), CASE(request_in_pieces), CASE(head_absent),
	CASE(head_of_three_bytes), CASE(attach_too_short), CASE(after_a_bad_one),
	CASE(map_too_short), CASE(unmap_too_short), CASE(tail_reserved), CASE(type_zero),
	CASE(type_six), CASE(type_255), CASE(head_reserved),
	CASE(attach_endpoint_unknown), CASE(attach_reserved), CASE(attach_flag_unknown),
	WITHOUT(attach_bypass_not_negotiated, VIRTIO_IOMMU_F_BYPASS_CONFIG),
	CASE(attach_again), CASE(attach_elsewhere), CASE(attach_elsewhere_with_company),
	CASE(attach_shared), CASE(attach_bypass_to_plain), CASE(attach_bypass_to_own_plain),
	CASE(attach_plain_to_bypass), CASE(attach_bypass), CASE(attach_last_domain),
	CASE(attach_domain_above_range),
	CASE(detach_ends_access), CASE(detach_endpoint_unknown), CASE(detach_not_attached),
	CASE(detach_from_another), CASE(detach_reserved), CASE(domain_made_anew),
	CASE(probe_endpoint), CASE(probe_rest), CASE(probe_endpoint_unknown),
	CASE(probe_list_too_short), CASE(probe_no_list), CASE(probe_too_short),
	CASE(probe_reserved),
};
const unsigned int request_case_count = ARRAY_SIZE(request_cases);
