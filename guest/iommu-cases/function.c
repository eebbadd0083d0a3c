// SPDX-License-Identifier: GPL-2.0
/* A virtio function on PCI by its registers (VIRTIO 1.3, 4.1), and split rings (2.7). */
#include <linux/delay.h>
#include <linux/gfp.h>
#include <linux/jiffies.h>
#include <linux/virtio_config.h>
#include <uapi/linux/virtio_pci.h>
#include <uapi/linux/virtio_ring.h>

#include "iommu-cases.h"

/* Where the parts of a ring are in its page: 16 descriptors take 256 bytes. */
#define AVAIL_AT	0x400
#define USED_AT		0x800

/* Maps what a capability of this type says; its place in configuration space. */
static void __iomem *part(struct pci_dev *pdev, u8 wanted, u8 *place)
{
	int at = pci_find_capability(pdev, PCI_CAP_ID_VNDR);

	while (at) {
		u8 type, bar;
		u32 offset, len;

		pci_read_config_byte(pdev, at + offsetof(struct virtio_pci_cap, cfg_type), &type);
		pci_read_config_byte(pdev, at + offsetof(struct virtio_pci_cap, bar), &bar);
		pci_read_config_dword(pdev, at + offsetof(struct virtio_pci_cap, offset), &offset);
		pci_read_config_dword(pdev, at + offsetof(struct virtio_pci_cap, length), &len);
		if (type == wanted && bar < PCI_STD_NUM_BARS && len) {
			*place = at;
			return pci_iomap_range(pdev, bar, offset, len);
		}
		at = pci_find_next_capability(pdev, at, PCI_CAP_ID_VNDR);
	}
	return NULL;
}

int function_open(struct function *fn, struct pci_dev *pdev)
{
	u8 place, notify_place;
	int ret = pci_enable_device(pdev);

	if (ret)
		return ret;
	fn->pdev = pdev;
	fn->common = part(pdev, VIRTIO_PCI_CAP_COMMON_CFG, &place);
	fn->notify = part(pdev, VIRTIO_PCI_CAP_NOTIFY_CFG, &notify_place);
	/* A device without a configuration has none of these. */
	fn->config = part(pdev, VIRTIO_PCI_CAP_DEVICE_CFG, &place);
	if (!fn->common || !fn->notify) {
		pci_err(pdev, "no virtio function of 1.0 or later\n");
		function_close(fn);
		return -ENODEV;
	}
	pci_read_config_dword(pdev, notify_place +
			      offsetof(struct virtio_pci_notify_cap, notify_off_multiplier),
			      &fn->notify_multiplier);
	pci_set_master(pdev);
	return 0;
}

void function_close(struct function *fn)
{
	if (!fn->pdev)
		return;
	if (fn->common)
		pci_iounmap(fn->pdev, fn->common);
	if (fn->notify)
		pci_iounmap(fn->pdev, fn->notify);
	if (fn->config)
		pci_iounmap(fn->pdev, fn->config);
	pci_disable_device(fn->pdev);
	*fn = (struct function) { };
}

static u8 status(struct function *fn)
{
	return ioread8(fn->common + VIRTIO_PCI_COMMON_STATUS);
}

static void set_status(struct function *fn, u8 value)
{
	iowrite8(value, fn->common + VIRTIO_PCI_COMMON_STATUS);
}

bool function_needs_reset(struct function *fn)
{
	return status(fn) & VIRTIO_CONFIG_S_NEEDS_RESET;
}

int function_reset(struct function *fn)
{
	unsigned long end = jiffies + ANSWER_SECONDS * HZ;

	set_status(fn, 0);
	while (status(fn)) {
		if (time_after(jiffies, end))
			return -ETIMEDOUT;
		usleep_range(100, 200);
	}
	return 0;
}

u64 function_features(struct function *fn)
{
	u64 low, high;

	iowrite32(0, fn->common + VIRTIO_PCI_COMMON_DFSELECT);
	low = ioread32(fn->common + VIRTIO_PCI_COMMON_DF);
	iowrite32(1, fn->common + VIRTIO_PCI_COMMON_DFSELECT);
	high = ioread32(fn->common + VIRTIO_PCI_COMMON_DF);
	return low | high << 32;
}

/* After a reset, up to the queues. */
int function_negotiate(struct function *fn, u64 features)
{
	const u8 before = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;

	set_status(fn, VIRTIO_CONFIG_S_ACKNOWLEDGE);
	set_status(fn, before);
	iowrite32(0, fn->common + VIRTIO_PCI_COMMON_GFSELECT);
	iowrite32(lower_32_bits(features), fn->common + VIRTIO_PCI_COMMON_GF);
	iowrite32(1, fn->common + VIRTIO_PCI_COMMON_GFSELECT);
	iowrite32(upper_32_bits(features), fn->common + VIRTIO_PCI_COMMON_GF);
	set_status(fn, before | VIRTIO_CONFIG_S_FEATURES_OK);
	return status(fn) & VIRTIO_CONFIG_S_FEATURES_OK ? 0 : -ENODEV;
}

void function_go(struct function *fn)
{
	set_status(fn, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER |
		   VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK);
}

int queue_alloc(struct queue *queue, struct function *fn, u16 index)
{
	*queue = (struct queue) { .fn = fn, .index = index };
	queue->page = (void *)get_zeroed_page(GFP_KERNEL);
	return queue->page ? 0 : -ENOMEM;
}

void queue_free(struct queue *queue)
{
	free_page((unsigned long)queue->page);
	queue->page = NULL;
}

static struct vring_desc *descriptors(struct queue *queue)
{
	return queue->page;
}

static struct vring_avail *avail_ring(struct queue *queue)
{
	return queue->page + AVAIL_AT;
}

static struct vring_used *used_ring(struct queue *queue)
{
	return queue->page + USED_AT;
}

static void write_address(void __iomem *at, u64 address)
{
	iowrite32(lower_32_bits(address), at);
	iowrite32(upper_32_bits(address), at + 4);
}

/*
 * An empty ring, at its page's guest-physical address: where an IOMMU translates, that has to be
 * mapped to itself. After features, before function_go().
 */
int queue_start(struct queue *queue)
{
	void __iomem *common = queue->fn->common;
	u64 at = virt_to_phys(queue->page);
	u16 offset;

	memset(queue->page, 0, PAGE_SIZE);
	queue->avail = queue->used = 0;
	avail_ring(queue)->flags = cpu_to_le16(VRING_AVAIL_F_NO_INTERRUPT);
	iowrite16(queue->index, common + VIRTIO_PCI_COMMON_Q_SELECT);
	queue->size = min_t(u16, ioread16(common + VIRTIO_PCI_COMMON_Q_SIZE), QUEUE_SIZE);
	if (!queue->size)
		return -ENODEV;
	iowrite16(queue->size, common + VIRTIO_PCI_COMMON_Q_SIZE);
	write_address(common + VIRTIO_PCI_COMMON_Q_DESCLO, at);
	write_address(common + VIRTIO_PCI_COMMON_Q_AVAILLO, at + AVAIL_AT);
	write_address(common + VIRTIO_PCI_COMMON_Q_USEDLO, at + USED_AT);
	offset = ioread16(common + VIRTIO_PCI_COMMON_Q_NOFF);
	queue->bell = queue->fn->notify + offset * queue->fn->notify_multiplier;
	iowrite16(1, common + VIRTIO_PCI_COMMON_Q_ENABLE);
	return 0;
}

/* Makes a chain available whose descriptors are those from `first` on. */
void queue_post(struct queue *queue, u16 first, const struct segment *segments, unsigned int count)
{
	struct vring_avail *avail = avail_ring(queue);
	unsigned int i;

	for (i = 0; i < count; i++) {
		u16 flags = segments[i].is_written ? VRING_DESC_F_WRITE : 0;

		if (i + 1 < count)
			flags |= VRING_DESC_F_NEXT;
		descriptors(queue)[first + i] = (struct vring_desc) {
			.addr = cpu_to_le64(segments[i].at),
			.len = cpu_to_le32(segments[i].len),
			.flags = cpu_to_le16(flags),
			.next = cpu_to_le16(first + i + 1),
		};
	}
	avail->ring[queue->avail % queue->size] = cpu_to_le16(first);
	queue->avail++;
	/* The device reads the chain after the index. */
	smp_store_release(&avail->idx, cpu_to_le16(queue->avail));
}

void queue_kick(struct queue *queue)
{
	iowrite16(queue->index, queue->bell);
}

/* A chain that the device has given back, if there is one. */
bool queue_take(struct queue *queue, u16 *id, u32 *len)
{
	struct vring_used *used = used_ring(queue);
	struct vring_used_elem *elem = &used->ring[queue->used % queue->size];

	/* The device writes the index after what it counts. */
	if (le16_to_cpu(smp_load_acquire(&used->idx)) == queue->used)
		return false;
	*id = le32_to_cpu(elem->id);
	*len = le32_to_cpu(elem->len);
	queue->used++;
	return true;
}

enum answer queue_wait(struct queue *queue, unsigned int seconds, u16 *id, u32 *len)
{
	unsigned long end = jiffies + seconds * HZ, looks = 0;

	while (!queue_take(queue, id, len)) {
		/* Reading the status may exit: not at each look. */
		if (!(++looks % 1000) && function_needs_reset(queue->fn))
			return BROKEN;
		if (looks > ANSWER_LOOKS && time_after(jiffies, end))
			return SILENT;
		cpu_relax();
		cond_resched();
	}
	return ANSWERED;
}
