# freeze.sh freeze|thaw FOLDER MOUNT-ID: freezes the file system, says so, and thaws it when its input ends. Descriptor 3
# is the locked record; 4 keeps the file system mounted.
trap '' PIPE
exec 4<"$2" || exit 3
while read -r name value; do
	[ "$name" = mnt_id: ] && id=$value
done <"/proc/$$/fdinfo/4"
[ "$id" = "$3" ] && [ -d "$2" ] || exit 3
at=/proc/$$/fd/4/.
if [ "$1" = thaw ]; then
	fsfreeze -u "$at" || exit 6
	exit 0
fi
sync -f "$at" || exit 4
echo synced
read -r go || exit 4
fsfreeze -f "$at" || exit 5
echo frozen
read -r end
fsfreeze -u "$at" || exit 6
