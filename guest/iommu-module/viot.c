// SPDX-License-Identifier: GPL-2.0
/*
 * ACPI Virtual I/O Translation table (VIOT): which PCI functions the device translates, and their
 * endpoint numbers.
 *
 * The table is the host's; every offset and length is checked before use. A node that does not
 * fit is reported and ends the walk. Node kinds without PCI endpoints are counted and skipped.
 */
#include <linux/acpi.h>
#include <linux/slab.h>

#include "exitless-iommu.h"

/* More ranges than this are ignored: one range covers a whole segment. */
#define EXI_RANGES_MAX 256

/* Returns the node at *offset, at least as long as its kind demands, and advances *offset. */
static const struct acpi_viot_header *viot_next(const struct acpi_table_viot *viot, u32 *offset)
{
	const struct acpi_viot_header *node;
	u32 at = *offset, need;

	if (at > viot->header.length || viot->header.length - at < sizeof(*node))
		return NULL;
	node = (const void *)viot + at;
	switch (node->type) {
	case ACPI_VIOT_NODE_PCI_RANGE:
		need = sizeof(struct acpi_viot_pci_range);
		break;
	case ACPI_VIOT_NODE_VIRTIO_IOMMU_PCI:
		need = sizeof(struct acpi_viot_virtio_iommu_pci);
		break;
	default:
		need = sizeof(*node);
	}
	if (node->length < need || node->length > viot->header.length - at)
		return NULL;
	*offset = at + node->length;
	return node;
}

/* Returns the offset of the node that describes the device itself, or 0. */
static u32 viot_find_self(struct exi_iommu *iommu, const struct acpi_table_viot *viot)
{
	const struct acpi_viot_virtio_iommu_pci *self;
	const struct acpi_viot_header *node;
	u32 offset = viot->node_offset, at;
	unsigned int i;

	for (i = 0; i < viot->node_count; i++) {
		at = offset;
		node = viot_next(viot, &offset);
		if (!node)
			return 0;
		if (node->type != ACPI_VIOT_NODE_VIRTIO_IOMMU_PCI)
			continue;
		self = (const void *)node;
		if (self->segment == pci_domain_nr(iommu->pdev->bus) &&
		    self->bdf == pci_dev_id(iommu->pdev))
			return at;
	}
	return 0;
}

static void viot_add_range(struct exi_iommu *iommu, const struct acpi_viot_pci_range *node)
{
	struct device *dev = &iommu->vdev->dev;

	if (node->segment_start > node->segment_end || node->bdf_start > node->bdf_end) {
		dev_warn(dev, "VIOT: PCI range ends before it starts, ignored\n");
		return;
	}
	if (iommu->nranges == EXI_RANGES_MAX) {
		dev_warn_once(dev, "VIOT: more than %u PCI ranges, the rest is ignored\n",
			      EXI_RANGES_MAX);
		return;
	}
	iommu->ranges[iommu->nranges++] = (struct exi_viot_range) {
		.segment_start = node->segment_start, .segment_end = node->segment_end,
		.bdf_start = node->bdf_start, .bdf_end = node->bdf_end,
		.endpoint_start = node->endpoint_start,
	};
}

/* Reads the ranges of endpoints that this device translates. */
int exi_viot_read(struct exi_iommu *iommu)
{
	struct device *dev = &iommu->vdev->dev;
	const struct acpi_viot_header *node;
	struct acpi_table_header *header;
	const struct acpi_table_viot *viot;
	unsigned int i, others = 0;
	u32 self, offset;
	int ret = -ENODEV;

	if (ACPI_FAILURE(acpi_get_table(ACPI_SIG_VIOT, 0, &header))) {
		dev_err(dev, "no ACPI table VIOT: the endpoints of this device are unknown\n");
		return -ENODEV;
	}
	viot = (const void *)header;
	if (header->length < sizeof(*viot) || viot->node_offset < sizeof(*viot)) {
		dev_err(dev, "VIOT: malformed header\n");
		goto out;
	}
	self = viot_find_self(iommu, viot);
	if (!self) {
		dev_err(dev, "VIOT does not name %s as an IOMMU\n", pci_name(iommu->pdev));
		goto out;
	}
	iommu->ranges = kcalloc(EXI_RANGES_MAX, sizeof(*iommu->ranges), GFP_KERNEL);
	if (!iommu->ranges) {
		ret = -ENOMEM;
		goto out;
	}
	offset = viot->node_offset;
	for (i = 0; i < viot->node_count; i++) {
		node = viot_next(viot, &offset);
		if (!node) {
			dev_warn(dev, "VIOT: node %u is malformed, reading stops there\n", i);
			break;
		}
		if (node->type == ACPI_VIOT_NODE_PCI_RANGE &&
		    ((const struct acpi_viot_pci_range *)node)->output_node == self)
			viot_add_range(iommu, (const void *)node);
		else if (node->type == ACPI_VIOT_NODE_MMIO)
			others++;
	}
	if (others)
		dev_warn(dev, "VIOT: %u platform endpoints are not supported\n", others);
	if (iommu->nranges)
		ret = 0;
	else
		dev_err(dev, "VIOT names no PCI endpoint of this device\n");
out:
	acpi_put_table(header);
	if (ret) {
		kfree(iommu->ranges);
		iommu->ranges = NULL;
	}
	return ret;
}

/* Says whether the device translates a function, and under which endpoint number. */
bool exi_viot_endpoint(const struct exi_iommu *iommu, struct pci_dev *pdev, u32 *id)
{
	u32 segment = pci_domain_nr(pdev->bus), bdf = pci_dev_id(pdev), i;

	/* A range may include the device's own function and bridges: neither is an endpoint. */
	if (pdev == iommu->pdev || pdev->hdr_type != PCI_HEADER_TYPE_NORMAL)
		return false;
	for (i = 0; i < iommu->nranges; i++) {
		const struct exi_viot_range *range = &iommu->ranges[i];

		if (segment < range->segment_start || segment > range->segment_end ||
		    bdf < range->bdf_start || bdf > range->bdf_end)
			continue;
		*id = ((segment - range->segment_start) << 16) + bdf - range->bdf_start +
		      range->endpoint_start;
		return true;
	}
	return false;
}
