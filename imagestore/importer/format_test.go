package importer

import (
	"strings"
	"testing"
)

func TestDetect(t *testing.T) {
	for name, c := range map[string]struct {
		head string
		want format
		text string
	}{
		"qcow2 v3":   {"QFI\xfb\x00\x00\x00\x03rest", formatQCOW2, ""},
		"qcow2 v2":   {"QFI\xfb\x00\x00\x00\x02rest", formatQCOW2, ""},
		"qcow v1":    {"QFI\xfb\x00\x00\x00\x01rest", "", "version 1, and only 2 and 3 can be read: convert it"},
		"raw":        {"\xeb\x63\x90\x00", formatRaw, ""},
		"zeros":      {"\x00\x00", formatRaw, ""},
		"empty":      {"", "", "empty"},
		"html":       {"\r\n <!DOCTYPE html><html>", "", "text page"},
		"json":       {`{"error": "not found"}`, "", "text page"},
		"vmdk":       {"KDMV\x01", formatVMDK, ""},
		"descriptor": {"# Disk DescriptorFile\nversion=1\n", formatVMDK, ""},
		"vhdx":       {"vhdxfile", formatVHDX, ""},
		"vhd":        {"conectix", formatVHD, ""},
		"bzip2":      {"BZh91AY", "", "bzip2"},
		"zip":        {"PK\x03\x04", "", "zip"},
		"7z":         {"7z\xbc\xaf\x27\x1c", "", "7z"},
		"tar":        {strings.Repeat("a", 257) + "ustar\x00", "", "tar"},
		"vdi":        {"<<< Oracle VM VirtualBox Disk Image >>>", "", "VDI"},
		"luks":       {"LUKS\xba\xbe\x00\x02", "", "encrypted"},
	} {
		got, err := detectFormat([]byte(c.head))
		if got != c.want || (err == nil) != (c.text == "") || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
