package importer

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/archive"
)

// FuzzDetect: for any head and tail, a file is of a single format. The reader of the format returns a possible disk, or
// an error with a kind, and a format refused by name is never a raw disk.
func FuzzDetect(f *testing.F) {
	for _, s := range []string{"QFI\xfb\x00\x00\x00\x03", "QFI\xfb\x00\x00\x00\x01", "QFI\xfb", "KDMV\x01", "COWD",
		"# Disk DescriptorFile\ncreateType=\"monolithicFlat\"\nRW 1 FLAT \"x\"\n", "vhdxfile", "conectix", "\x1f\x8b\x08",
		"\xfd7zXZ\x00", "\x28\xb5\x2f\xfd", "\x50\x2a\x4d\x18", "\xef\xbb\xbf<!DOCTYPE html>", `{"a":1}`, "\xeb\x63\x90\x00",
		"\xbe\xba\xfe\xca\x00\x00\x00\x00", strings.Repeat("a", 257) + "ustar\x00", ""} {
		f.Add([]byte(s), []byte(nil))
	}
	for _, x := range unsupportedFormats {
		f.Add(append(make([]byte, x.off), x.magic...), []byte(nil))
	}
	footer := make([]byte, tailSize) // of a fixed VHD disk of 4 KiB
	copy(footer, "conectix\x00\x00\x00\x02\x00\x01\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff")
	footer[63] = 2
	footer[46], footer[54] = 0x10, 0x10
	f.Add(bytes.Repeat([]byte("\xeb\x63\x90\x00"), 1<<10), footer)
	f.Fuzz(func(t *testing.T, head, tail []byte) {
		head = head[:min(len(head), headSize)]
		sound := func(err error) {
			t.Helper()
			if err != nil && (api.KindOf(err) == api.Other || len(err.Error()) > 1000 || strings.ContainsAny(err.Error(), "\n\x00")) {
				t.Fatalf("not a message: %v (kind %v)", err, api.KindOf(err))
			}
		}
		is, err := detectFormat(head)
		sound(err)
		if (err == nil) == (is == "") {
			t.Fatalf("%q, %v", is, err)
		}
		file := append(bytes.Clone(head), tail...)
		if end := file[max(len(file)-tailSize, 0):]; len(end) == tailSize && bytes.HasPrefix(end, []byte("conectix")) {
			binary.BigEndian.PutUint32(end[64:], 0)
			sum := uint32(0)
			for _, c := range end {
				sum += uint32(c)
			}
			binary.BigEndian.PutUint32(end[64:], ^sum) // right, so that the reader gets past the checksum
		}
		switch {
		case err != nil:
			return
		case is == formatRaw:
			for _, x := range unsupportedFormats {
				if len(head) > x.off && bytes.HasPrefix(head[x.off:], []byte(x.magic)) {
					t.Fatalf("%s is taken for raw", x.name)
				}
			}
			size, err := fixedVHD(file[max(len(file)-tailSize, 0):], int64(len(file)))
			if sound(err); err == nil && size != -1 && (size < 0 || size > int64(len(file))-tailSize) {
				t.Fatalf("a disk of %d bytes in a file of %d", size, len(file))
			}
			return
		case archive.Detect(head) != archive.None:
			t.Fatalf("it is both %s and %s", is, archive.Detect(head))
		}
		for _, stream := range []bool{false, true} {
			src, err := is.openImage(bytes.NewReader(file), int64(len(file)), stream)
			if sound(err); err != nil {
				continue
			}
			if n := src.Size(); n < 0 || n > api.MaxVolumeSize {
				t.Fatalf("a disk of %d bytes", n)
			}
			if err := src.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
