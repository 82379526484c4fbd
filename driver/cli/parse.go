package cli

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"drover.io/drover/api"
)

// parseSize reads 10Gi, 10GiB, 10G, 500M or plain bytes.
func parseSize(s string) (int64, error) {
	t := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSpace(s), "B"), "b")
	if n := len(t); n > 0 && strings.ContainsRune("gmtk", rune(t[n-1])) && t[n-1] != 'k' {
		t = t[:n-1] + strings.ToUpper(t[n-1:]) // 10g means 10G, as with most tools
	}
	q, err := resource.ParseQuantity(t)
	if err != nil || q.Sign() <= 0 {
		return 0, usagef("%q is not a size: write 10Gi, 500Mi, 20G or a number of bytes", s)
	}
	return q.Value(), nil
}

// volumeSize rounds a size up to a valid volume size and refuses larger sizes.
func volumeSize(s string) (int64, error) {
	n, err := parseSize(s)
	if err != nil {
		return 0, err
	}
	if n > api.MaxVolumeSize {
		return 0, api.Errorf(api.OutOfRange, "%s is more than a volume can have (%s)", s, api.SizeText(api.MaxVolumeSize))
	}
	return api.RoundSize(n), nil
}

// checkName refuses an invalid name before the API server does, in a shorter sentence.
func checkName(noun, name string) error {
	if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
		return api.Errorf(api.Invalid, "%q cannot be the name of a %s: use lower-case letters, digits, '-' and '.', "+
			"beginning and ending with a letter or digit", name, noun)
	}
	return nil
}

func parseTags(s string) []string {
	var out []string
	for _, t := range strings.Split(s, ",") {
		if t = strings.TrimSpace(t); t != "" {
			out = append(out, t)
		}
	}
	return out
}
