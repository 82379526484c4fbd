package api

import (
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Parameters of SourceRestore. With RestoreAllowDamaged, true, damaged chunks of the backup are restored as zeros; with
// RestoreOnDemand, true, only chunks that volumes read are restored, and the image never becomes ready. The others are
// Longhorn's: RestoreTargetName and RestoreConcurrency change nothing, because the URL leads to the target, and the
// node decides how much it reads at once.
const (
	RestoreBackupURL    = "backup-url"
	RestoreAllowDamaged = "allow-damaged"
	RestoreOnDemand     = "on-demand"
	RestoreTargetName   = "backup-target-name"
	RestoreConcurrency  = "concurrent-limit"
)

// Parameters of SourceExport. The type exists for users with the habit: an image is layers, not a file.
const (
	ExportVolume   = "volume-name"
	ExportSnapshot = "snapshot-name"
	ExportFormat   = "export-type"
)

// sourceParameters lists, for each source type, its parameters and whether each is required.
var sourceParameters = map[SourceType]map[string]bool{
	SourceDownload: {"url": true},
	SourceUpload:   {"size": false},
	SourceFile:     {"path": true},
	SourceClone:    {"backingImage": true},
	SourceRegistry: {"url": true, "plainHTTP": false},
	SourceRestore: {RestoreBackupURL: true, RestoreAllowDamaged: false, RestoreOnDemand: false, RestoreTargetName: false,
		RestoreConcurrency: false},
	SourceExport: {ExportVolume: true, ExportSnapshot: false, ExportFormat: false},
}

var (
	imageNamePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	checksumPattern  = regexp.MustCompile(`^[0-9a-f]{128}$`)
)

// ValidateImageName refuses names that an image cannot have. 63 is the longest value of a label.
func ValidateImageName(name string) error {
	if len(name) > 63 || !imageNamePattern.MatchString(name) {
		return Errorf(Invalid, "%q cannot be the name of a backing image: use at most 63 of a-z, 0-9, '-' and '.', "+
			"beginning and ending with a letter or a digit", name)
	}
	return nil
}

// Normalize puts users' input into the form that the API keeps: the checksum in lower case, without white space.
func (s *BackingImageSpec) Normalize() {
	s.Checksum = strings.ToLower(strings.TrimSpace(s.Checksum))
	if s.SourceParameters == nil {
		s.SourceParameters = map[string]string{}
	}
}

// Validate refuses a wish that can never come true, with kind invalid. The checksum is compared without regard to case.
func (s *BackingImageSpec) Validate() error {
	known, ok := sourceParameters[s.SourceType]
	if !ok {
		return Errorf(Invalid, "source type %q is unknown: use %s", s.SourceType, sourceTypes())
	}
	for _, k := range slices.Sorted(maps.Keys(s.SourceParameters)) {
		if _, ok := known[k]; !ok {
			return Errorf(Invalid, "parameter %q is unknown for source type %s: it takes %s", k, s.SourceType,
				strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
	}
	for _, k := range slices.Sorted(maps.Keys(known)) {
		if known[k] && s.SourceParameters[k] == "" {
			return Errorf(Invalid, "source type %s needs the parameter %q", s.SourceType, k)
		}
	}
	if err := s.validateParameters(); err != nil {
		return err
	}
	if s.SecretRef != nil && s.SourceType != SourceDownload && s.SourceType != SourceRegistry {
		return Errorf(Invalid, "secretRef is for the sources download and registry: source %s asks for no secret",
			s.SourceType)
	}
	if s.SecretRef != nil && s.SecretRef.Name == "" {
		return Errorf(Invalid, "secretRef needs the name of a Secret")
	}
	if c := strings.ToLower(s.Checksum); c != "" && !checksumPattern.MatchString(c) {
		return Errorf(Invalid, "checksum %q is not a SHA-512 (128 hex digits)", s.Checksum)
	}
	if s.MinNumberOfCopies < 0 {
		return Errorf(Invalid, "minNumberOfCopies is %d: it must be at least 1", s.MinNumberOfCopies)
	}
	for _, d := range s.CleanupDisks {
		if err := d.Validate(); err != nil {
			return Errorf(Invalid, "cleanupDisks: %w", err)
		}
	}
	return nil
}

// sourceTypes lists the usable types.
func sourceTypes() string {
	var names []string
	for t := range sourceParameters {
		names = append(names, string(t))
	}
	slices.Sort(names)
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}

// RegistryScheme begins the url of an image in a registry.
const RegistryScheme = "docker://"

func (s *BackingImageSpec) validateParameters() error {
	switch s.SourceType {
	case SourceDownload:
		u, err := url.Parse(s.SourceParameters["url"])
		if err != nil {
			// The error repeats the address, and the address may hold a password.
			return Errorf(Invalid, "parameter url cannot be read: are special characters escaped?")
		}
		if sc := strings.ToLower(u.Scheme); sc != "http" && sc != "https" {
			return Errorf(Invalid, "parameter url: scheme %q is not supported: use http or https", u.Scheme)
		}
		if u.Hostname() == "" {
			return Errorf(Invalid, "parameter url has no host")
		}
	case SourceRegistry:
		rest, ok := strings.CutPrefix(s.SourceParameters["url"], RegistryScheme)
		host, repo, _ := strings.Cut(rest, "/")
		if strings.Contains(host, "@") {
			// Not repeated: the host may hold a password.
			return Errorf(Invalid, "parameter url holds credentials: they belong in a Secret that secretRef names")
		}
		if !ok || host == "" || repo == "" {
			return Errorf(Invalid, "parameter url must be %sHOST[:PORT]/REPOSITORY[:TAG or @DIGEST]", RegistryScheme)
		}
		if v := s.SourceParameters["plainHTTP"]; v != "" && v != "true" && v != "false" {
			return Errorf(Invalid, "parameter plainHTTP is %q: it must be true or false", v)
		}
	case SourceExport:
		if v := s.SourceParameters[ExportFormat]; v != "" && v != "raw" && v != "qcow2" {
			return Errorf(Invalid, "parameter %s is %q: it must be raw or qcow2", ExportFormat, v)
		}
	case SourceClone:
		return ValidateImageName(s.SourceParameters["backingImage"])
	case SourceUpload:
		if v, ok := s.SourceParameters["size"]; ok {
			if n, err := strconv.ParseInt(v, 10, 64); err != nil || n <= 0 {
				return Errorf(Invalid, "parameter size is %q: it must be a number of bytes above 0", v)
			}
		}
	case SourceRestore:
		if err := ValidateBackupURL(s.SourceParameters[RestoreBackupURL]); err != nil {
			return Errorf(Invalid, "parameter %s: %w", RestoreBackupURL, err)
		}
		for _, name := range []string{RestoreAllowDamaged, RestoreOnDemand} {
			if v := s.SourceParameters[name]; v != "" && v != "true" && v != "false" {
				return Errorf(Invalid, "parameter %s is %q: it must be true or false", name, v)
			}
		}
		if v := s.SourceParameters[RestoreConcurrency]; v != "" {
			if n, err := strconv.Atoi(v); err != nil || n < 0 {
				return Errorf(Invalid, "parameter %s is %q: it must be a number from 0 on", RestoreConcurrency, v)
			}
		}
	case SourceFile:
		if p := s.SourceParameters["path"]; !path.IsAbs(p) {
			return Errorf(Invalid, "parameter path is %q: it must be absolute", p)
		}
	}
	return nil
}

// hasPassword reports whether a URL has a password. A user alone is a bucket, a container or a login name.
func hasPassword(u *url.URL) bool {
	_, has := u.User.Password()
	return has
}
