// SPDX-License-Identifier: GPL-2.0
/*
 * Test: a virtio-iommu device inside the guest's kernel, which keeps the protocol or breaks it as
 * told. Its parent is the PCI function of the real one, which must have no driver then, so that
 * VIOT names it. It translates no DMA: it only keeps the list of mappings, and checks that no MAP
 * overlaps another and no UNMAP splits one.
 */
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_ring.h>
#include <uapi/linux/virtio_iommu.h>

#include "exi-fake.h"

#define QUEUE_SIZE 64
#define MAPPINGS 8192
#define PROBE_SIZE 64
#define HELD QUEUE_SIZE

static struct virtio_device fake_vdev;
static struct virtqueue *fake_vqs[2];
static void *fake_pages[2];
static struct vring fake_ring;
static u16 fake_last_avail;
static u8 fake_status;
static DEFINE_SPINLOCK(fake_lock);

static enum fake_mode fake_mode;
static unsigned int fake_fail_after, fake_nheld, fake_nviolations;
static u16 fake_held[HELD];
static struct fake_mapping *fake_list;
static unsigned int fake_nlist;
static u64 fake_nmaps;

/* What a PROBE is answered: see fake_properties(). */
static int probe;
module_param(probe, int, 0644);

static struct virtio_iommu_config fake_config = {
	.page_size_mask = cpu_to_le64(~0xfffULL),
	.input_range = { .start = 0, .end = cpu_to_le64(~0ULL) },
	.domain_range = { .start = cpu_to_le32(1), .end = cpu_to_le32(100) },
	.probe_size = cpu_to_le32(PROBE_SIZE),
};

void fake_set_mode(enum fake_mode mode, unsigned int fail_after)
{
	unsigned long flags;

	spin_lock_irqsave(&fake_lock, flags);
	fake_mode = mode;
	fake_fail_after = fail_after;
	spin_unlock_irqrestore(&fake_lock, flags);
}

unsigned int fake_mapped(void)
{
	return READ_ONCE(fake_nlist);
}

unsigned int fake_violations(void)
{
	return READ_ONCE(fake_nviolations);
}

u64 fake_maps(void)
{
	return READ_ONCE(fake_nmaps);
}

bool fake_translate(u64 iova, struct fake_mapping *mapping)
{
	unsigned long flags;
	bool found = false;
	unsigned int i;

	spin_lock_irqsave(&fake_lock, flags);
	for (i = 0; i < fake_nlist && !found; i++) {
		found = iova >= fake_list[i].first && iova <= fake_list[i].last;
		if (found)
			*mapping = fake_list[i];
	}
	spin_unlock_irqrestore(&fake_lock, flags);
	return found;
}

static void violation(const char *what, u64 first, u64 last)
{
	fake_nviolations++;
	pr_err("exi-fake: %s %#llx-%#llx\n", what, first, last);
}

static u8 do_map(const struct virtio_iommu_req_map *req)
{
	u64 first = le64_to_cpu(req->virt_start), last = le64_to_cpu(req->virt_end);
	unsigned int i;

	fake_nmaps++;
	if (fake_mode == FAKE_MAP_FAILS) {
		if (!fake_fail_after)
			return VIRTIO_IOMMU_S_NOMEM;
		fake_fail_after--;
	}
	if (first >= last || (first | (last + 1) | le64_to_cpu(req->phys_start)) & 0xfff ||
	    last >> 48 || (first <= 0xfeefffff && last >= 0xfee00000))
		violation("MAP of a wrong range", first, last);
	for (i = 0; i < fake_nlist; i++)
		if (first <= fake_list[i].last && last >= fake_list[i].first) {
			violation("MAP over a mapping", first, last);
			return VIRTIO_IOMMU_S_INVAL;
		}
	if (fake_nlist == MAPPINGS)
		return VIRTIO_IOMMU_S_NOMEM;
	fake_list[fake_nlist++] = (struct fake_mapping) {
		first, last, le64_to_cpu(req->phys_start), le32_to_cpu(req->flags)
	};
	return VIRTIO_IOMMU_S_OK;
}

static u8 do_unmap(const struct virtio_iommu_req_unmap *req)
{
	u64 first = le64_to_cpu(req->virt_start), last = le64_to_cpu(req->virt_end);
	unsigned int i;

	if (fake_mode == FAKE_UNMAP_FAILS)
		return VIRTIO_IOMMU_S_DEVERR;
	for (i = 0; i < fake_nlist;) {
		struct fake_mapping *m = &fake_list[i];

		if (first > m->last || last < m->first) {
			i++;
			continue;
		}
		if (first > m->first || last < m->last) {
			violation("UNMAP splits a mapping", first, last);
			return VIRTIO_IOMMU_S_RANGE;
		}
		*m = fake_list[--fake_nlist];
	}
	return VIRTIO_IOMMU_S_OK;
}

/* Writes the properties and returns the used length without the tail. */
static u32 fake_properties(u8 *p)
{
	struct virtio_iommu_probe_resv_mem *resv = (void *)p;

	memset(p, 0, PROBE_SIZE);
	resv->head.type = cpu_to_le16(VIRTIO_IOMMU_PROBE_T_RESV_MEM);
	resv->head.length = cpu_to_le16(sizeof(*resv) - sizeof(resv->head));
	resv->start = cpu_to_le64(1ULL << 40);
	resv->end = cpu_to_le64((1ULL << 41) - 1);
	switch (probe) {
	case 1:		/* longer than the reply */
		resv->head.length = cpu_to_le16(PROBE_SIZE);
		break;
	case 2:		/* ends before it starts */
		resv->end = 0;
		break;
	case 3:		/* everything is reserved */
		resv->start = 0;
		resv->end = cpu_to_le64(~0ULL);
		break;
	case 4:		/* reply cut off */
		return PROBE_SIZE / 2;
	case 5:		/* an unknown property of no length, one with reserved bits, one at the end */
		memset(p, 0, PROBE_SIZE);
		p[0] = 9;
		p[5] = 0x10;
		memset(p + 8, 0xee, 2);
		p[10] = PROBE_SIZE - 12;
		break;
	case 6:		/* properties of no length to the very end */
		memset(p, 0, PROBE_SIZE);
		for (u32 i = 0; i < PROBE_SIZE; i += 4)
			p[i] = 2;
		break;
	}
	return PROBE_SIZE;
}

static void fake_used(u16 id, u32 len)
{
	struct vring_used *used = fake_ring.used;
	u16 idx = le16_to_cpu(used->idx);

	used->ring[idx % QUEUE_SIZE].id = cpu_to_le32(id);
	used->ring[idx % QUEUE_SIZE].len = cpu_to_le32(len);
	smp_wmb();
	WRITE_ONCE(used->idx, cpu_to_le16(idx + 1));
}

/* Answers the request at a descriptor: two descriptors, read and written. */
static void fake_answer(u16 id)
{
	struct vring_desc *out = &fake_ring.desc[id], *in;
	struct virtio_iommu_req_head *head = phys_to_virt(le64_to_cpu(out->addr));
	struct virtio_iommu_req_tail *tail;
	u8 status = VIRTIO_IOMMU_S_OK;
	u32 len = sizeof(*tail);

	in = &fake_ring.desc[le16_to_cpu(out->next)];
	tail = phys_to_virt(le64_to_cpu(in->addr));
	switch (head->type) {
	case VIRTIO_IOMMU_T_MAP:
		status = do_map((void *)head);
		break;
	case VIRTIO_IOMMU_T_UNMAP:
		status = do_unmap((void *)head);
		break;
	case VIRTIO_IOMMU_T_PROBE:
		len += fake_properties((u8 *)tail);
		tail = (void *)tail + PROBE_SIZE;
		break;
	case VIRTIO_IOMMU_T_DETACH:
		fake_nlist = 0;
		break;
	}
	if (fake_mode == FAKE_UNWRITTEN) {
		len = 0;
	} else {
		tail->status = status;
	}
	fake_used(fake_mode == FAKE_BAD_ID ? QUEUE_SIZE + 7 : id, len);
}

static bool fake_notify(struct virtqueue *vq)
{
	unsigned long flags;
	u16 id;

	if (vq != fake_vqs[0])
		return true;
	spin_lock_irqsave(&fake_lock, flags);
	while (fake_last_avail != le16_to_cpu(READ_ONCE(fake_ring.avail->idx))) {
		smp_rmb();
		id = le16_to_cpu(fake_ring.avail->ring[fake_last_avail++ % QUEUE_SIZE]);
		if (fake_mode == FAKE_HOLD)
			fake_held[fake_nheld++] = id;
		else
			fake_answer(id);
	}
	spin_unlock_irqrestore(&fake_lock, flags);
	return true;
}

/* Answers what was held, in order or in reverse. */
void fake_release(bool reverse)
{
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&fake_lock, flags);
	fake_mode = FAKE_OK;
	for (i = 0; i < fake_nheld; i++)
		fake_answer(fake_held[reverse ? fake_nheld - 1 - i : i]);
	fake_nheld = 0;
	spin_unlock_irqrestore(&fake_lock, flags);
}

static void fake_get(struct virtio_device *vdev, unsigned int offset, void *buf, unsigned int len)
{
	if (offset + len <= sizeof(fake_config))
		memcpy(buf, (u8 *)&fake_config + offset, len);
}

static void fake_set(struct virtio_device *vdev, unsigned int offset, const void *buf,
		     unsigned int len)
{
}

static u8 fake_get_status(struct virtio_device *vdev)
{
	return fake_status;
}

static void fake_set_status(struct virtio_device *vdev, u8 status)
{
	fake_status = status;
}

static void fake_reset(struct virtio_device *vdev)
{
	unsigned long flags;

	spin_lock_irqsave(&fake_lock, flags);
	fake_status = 0;
	fake_nlist = fake_nheld = fake_last_avail = 0;
	fake_mode = FAKE_OK;
	spin_unlock_irqrestore(&fake_lock, flags);
}

static u64 fake_get_features(struct virtio_device *vdev)
{
	return BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_IOMMU_F_MAP_UNMAP) |
	       BIT_ULL(VIRTIO_IOMMU_F_INPUT_RANGE) | BIT_ULL(VIRTIO_IOMMU_F_DOMAIN_RANGE) |
	       BIT_ULL(VIRTIO_IOMMU_F_PROBE) | BIT_ULL(VIRTIO_IOMMU_F_MMIO);
}

static int fake_finalize(struct virtio_device *vdev)
{
	vring_transport_features(vdev);
	return 0;
}

static void fake_del_vqs(struct virtio_device *vdev)
{
	int i;

	for (i = 0; i < 2; i++) {
		if (fake_vqs[i])
			vring_del_virtqueue(fake_vqs[i]);
		kfree(fake_pages[i]);
		fake_vqs[i] = NULL;
		fake_pages[i] = NULL;
	}
}

static int fake_make_vqs(struct virtio_device *vdev, struct virtqueue *vqs[])
{
	int i;

	for (i = 0; i < 2; i++) {
		fake_pages[i] = kzalloc(vring_size(QUEUE_SIZE, 64), GFP_KERNEL);
		if (fake_pages[i])
			fake_vqs[i] = vring_new_virtqueue(i, QUEUE_SIZE, 64, vdev, true, false,
							  fake_pages[i], fake_notify, NULL,
							  "fake");
		if (!fake_vqs[i]) {
			fake_del_vqs(vdev);
			return -ENOMEM;
		}
		vqs[i] = fake_vqs[i];
	}
	vring_init(&fake_ring, QUEUE_SIZE, fake_pages[0], 64);
	return 0;
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
static int fake_find_vqs(struct virtio_device *vdev, unsigned int n, struct virtqueue *vqs[],
			 struct virtqueue_info info[], struct irq_affinity *desc)
{
	return fake_make_vqs(vdev, vqs);
}
#else
static int fake_find_vqs(struct virtio_device *vdev, unsigned int n, struct virtqueue *vqs[],
			 vq_callback_t *callbacks[], const char * const names[], const bool *ctx,
			 struct irq_affinity *desc)
{
	return fake_make_vqs(vdev, vqs);
}
#endif

static const struct virtio_config_ops fake_ops = {
	.get = fake_get,
	.set = fake_set,
	.get_status = fake_get_status,
	.set_status = fake_set_status,
	.reset = fake_reset,
	.find_vqs = fake_find_vqs,
	.del_vqs = fake_del_vqs,
	.get_features = fake_get_features,
	.finalize_features = fake_finalize,
};

static void fake_dev_release(struct device *dev)
{
}

static int __init fake_init(void)
{
	struct pci_dev *pdev = pci_get_device(PCI_VENDOR_ID_REDHAT_QUMRANET, 0x1057, NULL);
	int ret;

	if (!pdev)
		return -ENODEV;
	fake_list = kvcalloc(MAPPINGS, sizeof(*fake_list), GFP_KERNEL);
	if (!fake_list)
		return -ENOMEM;
	fake_vdev.id.device = VIRTIO_ID_IOMMU;
	fake_vdev.id.vendor = PCI_VENDOR_ID_REDHAT_QUMRANET;
	fake_vdev.config = &fake_ops;
	fake_vdev.dev.parent = &pdev->dev;
	fake_vdev.dev.release = fake_dev_release;
	ret = register_virtio_device(&fake_vdev);
	if (ret)
		put_device(&fake_vdev.dev);
	ret = ret ?: fake_client_init();
	return ret;
}

static void __exit fake_exit(void)
{
	struct pci_dev *pdev = to_pci_dev(fake_vdev.dev.parent);

	fake_client_exit();
	unregister_virtio_device(&fake_vdev);
	pci_dev_put(pdev);
	kvfree(fake_list);
}

module_init(fake_init);
module_exit(fake_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("test: a virtio-iommu device that breaks the protocol when told");
