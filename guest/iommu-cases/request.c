// SPDX-License-Identifier: GPL-2.0
/* The IOMMU's requests (VIRTIO 1.3, 5.13.6), and what a case says of their answers. */
#include <linux/delay.h>
#include <linux/gfp.h>
#include <linux/jiffies.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "iommu-cases.h"

/* The device-writable half of a page. */
#define IN_AT		(PAGE_SIZE / 2)
#define EVENTS		8
#define FAULT_SECONDS	5

/* What a driver of this list makes use of, where the device has it. */
#define WANTED	(BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_IOMMU_F_INPUT_RANGE) | \
		 BIT_ULL(VIRTIO_IOMMU_F_DOMAIN_RANGE) | BIT_ULL(VIRTIO_IOMMU_F_MAP_UNMAP) | \
		 BIT_ULL(VIRTIO_IOMMU_F_PROBE) | BIT_ULL(VIRTIO_IOMMU_F_MMIO) | \
		 BIT_ULL(VIRTIO_IOMMU_F_BYPASS_CONFIG))
/* And what the list cannot do without. */
#define NEEDED	(BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_IOMMU_F_MAP_UNMAP) | \
		 BIT_ULL(VIRTIO_IOMMU_F_PROBE) | BIT_ULL(VIRTIO_IOMMU_F_BYPASS_CONFIG))

static u64 config64(struct iommu *iommu, unsigned int at)
{
	u64 low = ioread32(iommu->fn.config + at);

	return low | (u64)ioread32(iommu->fn.config + at + 4) << 32;
}

#define CONFIG(field) offsetof(struct virtio_iommu_config, field)

void iommu_set_bypass(struct iommu *iommu, u8 value)
{
	iowrite8(value, iommu->fn.config + CONFIG(bypass));
}

u8 iommu_bypass(struct iommu *iommu)
{
	return ioread8(iommu->fn.config + CONFIG(bypass));
}

int iommu_open(struct iommu *iommu, struct pci_dev *pdev)
{
	u64 offered;
	int ret = function_open(&iommu->fn, pdev);

	if (ret)
		return ret;
	iommu->out = (u8 *)get_zeroed_page(GFP_KERNEL);
	iommu->reports = kcalloc(EVENTS, sizeof(*iommu->reports), GFP_KERNEL);
	if (!iommu->out || !iommu->reports || queue_alloc(&iommu->requests, &iommu->fn, 0) ||
	    queue_alloc(&iommu->events, &iommu->fn, 1)) {
		iommu_close(iommu);
		return -ENOMEM;
	}
	iommu->in = iommu->out + IN_AT;
	offered = function_features(&iommu->fn);
	if (!iommu->fn.config || (offered & NEEDED) != NEEDED) {
		pci_err(pdev, "the device lacks what the cases need: features %#llx\n", offered);
		iommu_close(iommu);
		return -ENODEV;
	}
	iommu->input_last = U64_MAX;
	iommu->domain_last = U32_MAX;
	if (offered & BIT_ULL(VIRTIO_IOMMU_F_INPUT_RANGE)) {
		iommu->input_first = config64(iommu, CONFIG(input_range.start));
		iommu->input_last = config64(iommu, CONFIG(input_range.end));
	}
	if (offered & BIT_ULL(VIRTIO_IOMMU_F_DOMAIN_RANGE))
		iommu->domain_last = ioread32(iommu->fn.config + CONFIG(domain_range.end));
	iommu->probe_size = ioread32(iommu->fn.config + CONFIG(probe_size));
	if (iommu->probe_size > IN_AT - sizeof(struct virtio_iommu_req_tail)) {
		pci_err(pdev, "properties of %u bytes have no room here\n", iommu->probe_size);
		iommu_close(iommu);
		return -E2BIG;
	}
	return 0;
}

void iommu_close(struct iommu *iommu)
{
	queue_free(&iommu->requests);
	queue_free(&iommu->events);
	kfree(iommu->reports);
	free_page((unsigned long)iommu->out);
	iommu->reports = NULL;
	iommu->out = NULL;
	function_close(&iommu->fn);
}

static void post_event(struct iommu *iommu, u16 id)
{
	struct segment segment = {
		.at = virt_to_phys(&iommu->reports[id]),
		.len = iommu->event_len,
		.is_written = true,
	};

	memset(&iommu->reports[id], UNWRITTEN, sizeof(iommu->reports[id]));
	queue_post(&iommu->events, id, &segment, 1);
}

/* Resets it and starts it anew, with event buffers of event_len bytes each. */
int iommu_start(struct iommu *iommu, u64 without)
{
	u64 features = function_features(&iommu->fn) & WANTED & ~without;
	u16 id;
	int ret = function_reset(&iommu->fn);

	ret = ret ?: function_negotiate(&iommu->fn, features);
	ret = ret ?: queue_start(&iommu->requests);
	ret = ret ?: queue_start(&iommu->events);
	if (ret)
		return ret;
	function_go(&iommu->fn);
	for (id = 0; id < EVENTS; id++)
		post_event(iommu, id);
	queue_kick(&iommu->events);
	return 0;
}

void say(struct run *run, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	run->len += vscnprintf(run->line + run->len, sizeof(run->line) - run->len, format, args);
	va_end(args);
}

static unsigned int segments_of(struct segment *to, u8 *bytes, unsigned int len, unsigned int cut,
				bool is_written)
{
	unsigned int at, count = 0;

	if (!cut)
		cut = max(len, 1U);
	for (at = 0; at < len; at += cut)
		to[count++] = (struct segment) {
			.at = virt_to_phys(bytes + at),
			.len = min(cut, len - at),
			.is_written = is_written,
		};
	return count;
}

/* The one chain that is under way, from the bytes in iommu->out; answers land in iommu->in. */
static enum answer exchange(struct iommu *iommu, const struct cut *cut, u32 *len)
{
	struct segment segments[QUEUE_SIZE];
	unsigned int count;
	u16 id;

	if (WARN_ON(cut->out_cut && DIV_ROUND_UP(cut->out_len, cut->out_cut) > QUEUE_SIZE - 4) ||
	    WARN_ON(cut->in_cut && DIV_ROUND_UP(cut->in_len, cut->in_cut) > 4))
		return SILENT;
	memset(iommu->in, UNWRITTEN, PAGE_SIZE - IN_AT);
	count = segments_of(segments, iommu->out, cut->out_len, cut->out_cut, false);
	count += segments_of(segments + count, iommu->in, cut->in_len, cut->in_cut, true);
	queue_post(&iommu->requests, 0, segments, count);
	queue_kick(&iommu->requests);
	return queue_wait(&iommu->requests, ANSWER_SECONDS, &id, len);
}

/* Sends a request, and says NAME=STATUS/LENGTH: the status byte is `-` if it was not written. */
void send(struct run *run, const struct cut *cut)
{
	struct iommu *iommu = run->iommu;
	u32 len;
	u8 status;

	if (run->is_over)
		return;
	switch (exchange(iommu, cut, &len)) {
	case SILENT:
		say(run, " %s=silent", cut->name);
		run->is_over = true;
		return;
	case BROKEN:
		say(run, " %s=broken", cut->name);
		run->is_over = true;
		return;
	case ANSWERED:
		break;
	}
	status = iommu->in[cut->tail_at];
	if (cut->tail_at >= cut->in_len || status == UNWRITTEN)
		say(run, " %s=-/%u", cut->name, len);
	else
		say(run, " %s=%u/%u", cut->name, status, len);
}

/* Sends a request without a word, if the device still answers: whether it succeeded. */
bool succeeds(struct run *run, unsigned int out_len)
{
	const struct cut cut = {
		.out_len = out_len,
		.in_len = sizeof(struct virtio_iommu_req_tail),
	};
	u32 len;

	if (run->is_over)
		return false;
	return exchange(run->iommu, &cut, &len) == ANSWERED && len == cut.in_len &&
	       *run->iommu->in == VIRTIO_IOMMU_S_OK;
}

/*
 * Detaches both endpoints from the domains of a case, whatever the answers: not every device
 * forgets them on a reset.
 */
void iommu_forget(struct run *run)
{
	u32 domain;

	for (domain = run->domain; domain < run->domain + DOMAINS; domain++) {
		succeeds(run, make_detach(run, domain, run->endpoint));
		succeeds(run, make_detach(run, domain, run->other));
	}
}

/* The bytes of a request of this type, zero but for that. */
static void *blank(struct run *run, u8 type)
{
	memset(run->iommu->out, 0, IN_AT);
	*run->iommu->out = type;
	return run->iommu->out;
}

unsigned int make_attach(struct run *run, u32 domain, u32 endpoint, u32 flags)
{
	struct virtio_iommu_req_attach *req = blank(run, VIRTIO_IOMMU_T_ATTACH);

	req->domain = cpu_to_le32(domain);
	req->endpoint = cpu_to_le32(endpoint);
	req->flags = cpu_to_le32(flags);
	return offsetof(typeof(*req), tail);
}

unsigned int make_detach(struct run *run, u32 domain, u32 endpoint)
{
	struct virtio_iommu_req_detach *req = blank(run, VIRTIO_IOMMU_T_DETACH);

	req->domain = cpu_to_le32(domain);
	req->endpoint = cpu_to_le32(endpoint);
	return offsetof(typeof(*req), tail);
}

unsigned int make_map(struct run *run, u32 domain, u64 start, u64 end, u64 phys, u32 flags)
{
	struct virtio_iommu_req_map *req = blank(run, VIRTIO_IOMMU_T_MAP);

	req->domain = cpu_to_le32(domain);
	req->virt_start = cpu_to_le64(start);
	req->virt_end = cpu_to_le64(end);
	req->phys_start = cpu_to_le64(phys);
	req->flags = cpu_to_le32(flags);
	return offsetof(typeof(*req), tail);
}

unsigned int make_unmap(struct run *run, u32 domain, u64 start, u64 end)
{
	struct virtio_iommu_req_unmap *req = blank(run, VIRTIO_IOMMU_T_UNMAP);

	req->domain = cpu_to_le32(domain);
	req->virt_start = cpu_to_le64(start);
	req->virt_end = cpu_to_le64(end);
	return offsetof(typeof(*req), tail);
}

unsigned int make_probe(struct run *run, u32 endpoint)
{
	struct virtio_iommu_req_probe *req = blank(run, VIRTIO_IOMMU_T_PROBE);

	req->endpoint = cpu_to_le32(endpoint);
	return sizeof(*req);
}

static void send_whole(struct run *run, const char *name, unsigned int out_len)
{
	const unsigned int tail = sizeof(struct virtio_iommu_req_tail);

	send(run, &(struct cut) { .name = name, .out_len = out_len, .in_len = tail });
}

void attach(struct run *run, u32 domain, u32 endpoint, u32 flags)
{
	send_whole(run, "attach", make_attach(run, domain, endpoint, flags));
}

void detach(struct run *run, u32 domain, u32 endpoint)
{
	send_whole(run, "detach", make_detach(run, domain, endpoint));
}

void map_range(struct run *run, u32 domain, u64 start, u64 end, u64 phys, u32 flags)
{
	send_whole(run, "map", make_map(run, domain, start, end, phys, flags));
}

void unmap(struct run *run, u32 domain, u64 start, u64 end)
{
	send_whole(run, "unmap", make_unmap(run, domain, start, end));
}

void probe(struct run *run, u32 endpoint)
{
	const unsigned int tail = sizeof(struct virtio_iommu_req_tail);
	u32 size = run->iommu->probe_size;

	send(run, &(struct cut) {
		.name = "probe",
		.out_len = make_probe(run, endpoint),
		.in_len = size + tail,
		.tail_at = size,
	});
}

/*
 * Says what the first report of this endpoint is: REASON/FLAGS/ADDRESS, `none` if none comes. A
 * report that is not all there says `cut/LENGTH`.
 */
void fault(struct run *run)
{
	struct iommu *iommu = run->iommu;
	unsigned long end = jiffies + FAULT_SECONDS * HZ;
	u16 id;
	u32 len;

	if (run->is_over)
		return;
	while (time_before(jiffies, end)) {
		const struct virtio_iommu_fault *report;

		if (!queue_take(&iommu->events, &id, &len)) {
			usleep_range(100, 200);
			continue;
		}
		if (WARN_ON(id >= EVENTS))
			break;
		report = &iommu->reports[id];
		if (len < sizeof(*report)) {
			say(run, " fault=cut/%u", len);
			return;
		}
		if (le32_to_cpu(report->endpoint) == run->endpoint) {
			say(run, " fault=%u/%x/%llx", report->reason, le32_to_cpu(report->flags),
			    le64_to_cpu(report->address));
			return;
		}
		post_event(iommu, id);
		queue_kick(&iommu->events);
	}
	say(run, " fault=none");
}
