// Names of temporary files and folders, where the system is told to put them.
#pragma once
#include <cstdlib>
#include <string>

// For mkstemp and mkdtemp.
inline std::string temporary(const std::string& name) {
  const char* folder = std::getenv("TMPDIR");
  return std::string(folder && *folder ? folder : "/tmp") + "/" + name + "-XXXXXX";
}
