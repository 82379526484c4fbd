// Package imagestore keeps backing images: the planner decides which disks hold copies, the host of each node makes the
// copies of its disks.
//
//	BackingImage --planner--> ImageCopy --host--> layer on a disk
//
//	planner/    controller role: the disks of an image's copies, from objects alone; status of BackingImages
//	host/       node role: transfers to the disks of the node; status of ImageCopies
//	importer/   one image on one disk: import, copy, find, verify, repair, remove
//	origin/     the bytes of an import: http, upload, registry, a file of the node
//	archive/    gzip, xz and zstd, with limits
//	format/     qcow2, VMDK, VHD and VHDX
//
// Each status has one writer. UIDs name the data on a disk: an image with the name of an earlier image never meets the
// data of the earlier image.
package imagestore
